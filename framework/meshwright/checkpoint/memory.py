"""Mirror of a run in host memory: a checkpoint of the last step, in a file system that is memory.

    /dev/shm/.../
      even/ odd/     steps in turns: the last one is complete while the next one is written
        pp0-dp0-tp0.safetensors   boxes of one rank; mapped by its first write, then overwritten in place
        pp0-dp0-tp0.frozen.safetensors   boxes of its frozen weights, copied once; one file, linked into both
        pp0-dp0-tp0.shard.json    report of its tensors, written with the files
        pp0-dp0-tp0.step.json     step and counters; removed before the boxes change, written after
        pp0-dp1-tp0.*             the same of a rank on the node before: see run/mirror.py

The boxes are those of a checkpoint on disk (``run/pieces.py``), and so is their reader: any layout can
read them (memory_read.py). A mark has the degrees of the grid whose ranks wrote the step, and so the names
of all of its shards. Nothing is hashed or synced: the mirror outlives the ranks, not their launcher.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from meshwright.checkpoint.manifest import (
    CheckpointMetadata,
    FileEntry,
    Int64,
    StrictModel,
    TensorEntry,
)
from meshwright.checkpoint.shard import (
    REPORT_SUFFIX,
    ShardReport,
    TensorPiece,
    describe,
    lay_out,
)
from meshwright.mesh.grid import Grid
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import MAX_MANIFEST_BYTES, read_bytes
from meshwright.system.numbers import MAX_RANKS

SLOTS = ("even", "odd")
MARK_SUFFIX = ".step.json"
FILE_SUFFIX = ".safetensors"
FROZEN_SUFFIX = ".frozen.safetensors"
NO_HASH = "0" * 64
ONE_RANK = Grid()
Degree = Annotated[int, Field(ge=1, le=MAX_RANKS)]


class StepMark(StrictModel):
    """Mark of a complete mirror of one rank: metadata of the step, in plain JSON."""

    generation: Int64
    """Number of the launch of this run's ranks that wrote it."""
    degrees: Annotated[tuple[Degree, ...], Field(min_length=5, max_length=5)]
    """Grid of the ranks that wrote the step; see :attr:`Grid.degrees`."""
    step: Int64
    samples_seen: Int64
    seed: Int64
    config: dict[str, object]
    data_fingerprint: dict[str, str]
    state: dict[str, object]

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        """Check that so many ranks are possible: the names of their shards are listed."""
        if self.grid.size > MAX_RANKS:
            raise ValueError(f"{self.grid} has more than {MAX_RANKS:,} ranks")
        return self

    @property
    def grid(self) -> Grid:
        """Grid of the ranks that wrote the step."""
        return Grid.of(self.degrees)

    @property
    def head(self) -> CheckpointMetadata:
        """Metadata of the checkpoint."""
        return CheckpointMetadata(
            self.step,
            self.samples_seen,
            self.seed,
            self.config,
            self.data_fingerprint,
            self.state,
        )


class ShardMemory:
    """Files of one rank's shard in this node's memory, in both slots. Of each step: ``begin``,
    change the mapped bytes, ``complete``.
    """

    def __init__(self, directory: Path, shard_name: str) -> None:
        """Write below ``directory`` as ``shard_name``."""
        self._directory, self.shard_name = directory, shard_name
        self._maps: dict[str, Tensor] = {}
        self._frozen: tuple[Path, Tensor] | None = None
        """File of the frozen weights, and its bytes."""

    def begin(self, slot: str) -> None:
        """Take back the mark of the step before in this slot."""
        self._path(slot, MARK_SUFFIX).unlink(missing_ok=True)

    def complete(self, slot: str, mark: str) -> None:
        """Mark the slot as complete."""
        write_atomic(self._path(slot, MARK_SUFFIX), mark, is_durable=False)

    def bytes_of(self, slot: str) -> Tensor:
        """Return the mapped bytes of the slot's file, (size,) uint8."""
        return self._maps[slot]

    def lay_out(self, slot: str, size: int, report: str) -> Tensor:
        """Make and map the slot's file; return its bytes, (size,) uint8.

        Raises:
            OSError: the memory is full.
        """
        self._path(slot, MARK_SUFFIX).parent.mkdir(mode=0o700, exist_ok=True)
        self._maps.pop(slot, None)
        self._maps[slot] = _map_new(self._path(slot, FILE_SUFFIX), size)
        write_atomic(self._path(slot, REPORT_SUFFIX), report, is_durable=False)
        return self._maps[slot]

    def lay_out_frozen(self, slot: str, size: int) -> Tensor:
        """Make and map the file of the frozen weights; return its bytes, (size,) uint8.

        Raises:
            OSError: the memory is full.
        """
        path = self._path(slot, FROZEN_SUFFIX)
        self._frozen = path, _map_new(path, size)
        return self._frozen[1]

    def link_frozen(self, slot: str) -> None:
        """Use the file of the frozen weights in this slot too."""
        assert self._frozen is not None
        source, path = self._frozen[0], self._path(slot, FROZEN_SUFFIX)
        if path != source:
            path.unlink(missing_ok=True)
            path.hardlink_to(source)

    def clear(self) -> None:
        """Remove the files, and free the maps."""
        self._maps.clear()
        self._frozen = None
        for path in self._directory.glob(f"*/{self.shard_name}.*"):
            path.unlink(missing_ok=True)

    def _path(self, slot: str, suffix: str) -> Path:
        return self._directory / slot / f"{self.shard_name}{suffix}"


def _map_new(path: Path, size: int) -> Tensor:
    """Make a file of ``size`` bytes in memory and map it.

    Raises:
        OSError: the memory is full.
    """
    path.unlink(missing_ok=True)  # of a process that has died
    with path.open("xb") as file:
        # reserved now: a write to a map of a full file system would kill the process
        os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


class MirroredShard(NamedTuple):
    """One rank's mirror of a step, as another node gets it."""

    slot: str
    mark: str
    report: str
    """Empty: as in the step before in this slot."""
    data: Tensor
    """Bytes of the file, (size,) uint8."""
    has_frozen: bool = False
    """The report names a file of frozen weights."""
    frozen: Tensor | None = None
    """Its bytes; None: those that were sent before."""


class _Layout(NamedTuple):
    """Pieces that a slot was laid out for, and where their boxes are in memory."""

    pieces: list[tuple[str, int | None, torch.dtype, int]]
    targets: list[Tensor]
    frozen_versions: list[int]
    """Version of each frozen tensor that was copied."""


class MirrorWriter:
    """Writer of one rank's mirror. Holds two maps of its boxes."""

    def __init__(
        self,
        directory: Path,
        shard_name: str,
        generation: int = 0,
        frozen_names: frozenset[str] = frozenset(),
        grid: Grid = ONE_RANK,
    ) -> None:
        """Write below ``directory`` as ``shard_name``, one of the shards of ``grid``; ``generation``:
        see :class:`StepMark`.

        ``frozen_names``: parameters that no step changes; they are copied once.
        """
        self._degrees = grid.degrees
        self._shard = ShardMemory(directory, shard_name)
        self._generation = generation
        self._frozen_names = frozen_names
        self._layouts: dict[str, _Layout] = {}
        self._frozen_versions: list[int] = []

    def write(self, head: CheckpointMetadata, pieces: Iterable[TensorPiece]) -> MirroredShard:
        """Copy this rank's pieces of a step, then mark the step as complete. Blocks.

        Raises:
            OSError: the memory is full. The run cannot resume from this step then.
        """
        slot = SLOTS[head.step % 2]
        self._shard.begin(slot)
        frozen: list[TensorPiece] = []
        changing: list[TensorPiece] = []
        for piece in pieces:
            (frozen if piece.info.name in self._frozen_names else changing).append(piece)
        kinds = [
            (piece.kind.of(piece.info.name), piece.start, piece.tensor.dtype, piece.num_bytes)
            for piece in changing
        ]
        # a callback may change them; torch counts changes in place
        versions = [piece.tensor._version for piece in frozen]
        found = self._layouts.get(slot)
        report, new_frozen = "", None
        if found is None or (found.pieces, found.frozen_versions) != (kinds, versions):
            report, new_frozen, targets = self._lay_out(slot, changing, frozen, versions)
            found = self._layouts[slot] = _Layout(kinds, targets, versions)
        _copy(changing, found.targets)
        mark = StepMark(
            generation=self._generation, degrees=self._degrees, **head._asdict()
        ).model_dump_json()
        self._shard.complete(slot, mark)
        data = self._shard.bytes_of(slot)
        return MirroredShard(slot, mark, report, data, bool(frozen), new_frozen)

    def clear(self) -> None:
        """Remove this rank's files, and free its maps."""
        self._layouts.clear()
        self._shard.clear()

    def _lay_out(
        self,
        slot: str,
        changing: Sequence[TensorPiece],
        frozen: Sequence[TensorPiece],
        versions: list[int],
    ) -> tuple[str, Tensor | None, list[Tensor]]:
        """Make and map the slot's files. Return the report, the bytes of the frozen weights if they
        were copied, and the memory of each box that steps change.
        """
        plan = _plan(changing, f"{self._shard.shard_name}{FILE_SUFFIX}")
        entries = dict(plan.entries)
        files = {plan.file: FileEntry(size=plan.size, sha256=NO_HASH)}
        frozen_plan = _plan(frozen, f"{self._shard.shard_name}{FROZEN_SUFFIX}") if frozen else None
        if frozen_plan is not None:
            entries |= frozen_plan.entries
            files[frozen_plan.file] = FileEntry(size=frozen_plan.size, sha256=NO_HASH)
        report = ShardReport(tensors=entries, files=files).model_dump_json()
        targets = plan.targets_in(self._shard.lay_out(slot, plan.size, report))
        new_frozen = None
        if frozen_plan is not None and self._frozen_versions != versions:
            new_frozen = self._shard.lay_out_frozen(slot, frozen_plan.size)
            _copy(frozen, frozen_plan.targets_in(new_frozen))
            self._frozen_versions = versions
        elif frozen_plan is not None:
            self._shard.link_frozen(slot)
        return report, new_frozen, targets


class _FilePlan(NamedTuple):
    """Layout of one file of a shard."""

    file: str
    header: bytes
    boxes: dict[str, Tensor]
    """View of each box by its key, in the order of the pieces."""
    ordered: dict[str, Tensor]
    """The same in the order of their bytes."""
    entries: Mapping[str, TensorEntry]

    @property
    def size(self) -> int:
        """Bytes of the file: header and boxes, which have no padding."""
        return len(self.header) + sum(
            box.numel() * box.element_size() for box in self.ordered.values()
        )

    def targets_in(self, memory: Tensor) -> list[Tensor]:
        """Write the header to the file's bytes; return the memory of each box, in the order of the
        pieces.
        """
        at = len(self.header)
        memory[:at] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        targets: dict[str, Tensor] = {}
        for key, box in self.ordered.items():
            stop = at + box.numel() * box.element_size()
            targets[key] = memory[at:stop].view(box.dtype).view(box.shape)
            at = stop
        return [targets[key] for key in self.boxes]


def _plan(pieces: Sequence[TensorPiece], file: str) -> _FilePlan:
    """Return the layout of a file with these pieces."""
    described = [describe(piece, file) for piece in pieces]
    boxes = {key: view for _, _, views in described for key, view in views.items()}
    header, ordered = lay_out(boxes)
    return _FilePlan(file, header, boxes, ordered, {name: entry for name, entry, _ in described})


def _copy(pieces: Sequence[TensorPiece], targets: Sequence[Tensor]) -> None:
    """Copy the boxes of pieces."""
    views = (box.tensor for piece in pieces if piece.num_bytes for box in piece.boxes())
    for target, view in zip(targets, views, strict=True):
        target.copy_(view)


class MirrorCopy:
    """Copy of another rank's mirror in this node's memory. Of each step: ``begin``, receive into
    the bytes that it returns, ``complete``.
    """

    def __init__(self, directory: Path, shard_name: str) -> None:
        """Write below ``directory`` as the other rank does below its own."""
        self._shard = ShardMemory(directory, shard_name)
        self._is_laid_out: set[str] = set()

    def begin(
        self, slot: str, report: str, size: int, frozen_size: int, *, has_frozen: bool
    ) -> list[Tensor]:
        """Return the memory for the file's bytes and, with ``frozen_size``, for those of the frozen
        weights.

        Raises:
            OSError: the memory is full.
        """
        self._shard.begin(slot)
        if report:
            self._shard.lay_out(slot, size, report)
        memory = [self._shard.bytes_of(slot)]
        if frozen_size:
            memory.append(self._shard.lay_out_frozen(slot, frozen_size))
        elif report and has_frozen:
            self._shard.link_frozen(slot)
        return memory

    def complete(self, slot: str, mark: str) -> None:
        """Mark the slot as complete."""
        self._shard.complete(slot, mark)

    def clear(self) -> None:
        """Remove the files, and free the maps."""
        self._shard.clear()


def newest_step(directory: Path) -> int:
    """Return the newest step that any rank has mirrored; 0: none. It need not be complete."""
    return max((mark.step for _, _, mark in read_marks(directory)), default=0)


def read_marks(directory: Path) -> list[tuple[str, str, StepMark]]:
    """Return (slot, shard name, mark) of all shards in a node's memory; damaged marks are left out."""
    found = []
    for path in sorted(directory.glob(f"*/*{MARK_SUFFIX}")):
        with contextlib.suppress(OSError, ValidationError):
            mark = StepMark.model_validate_json(read_bytes(path, MAX_MANIFEST_BYTES))
            found.append((path.parent.name, path.name.removesuffix(MARK_SUFFIX), mark))
    return found


def remove_others(directory: Path, slot: str, shard_names: Iterable[str]) -> None:
    """Remove the shards in a slot of a node's memory that are not among ``shard_names``: of ranks that
    were here, or were held here, before a recovery.
    """
    kept = set(shard_names)
    for path in directory.glob(f"{slot}/*"):
        shard_name = path.name.partition(".")[0]
        if shard_name and shard_name not in kept:  # "": a file that is about to be renamed
            path.unlink(missing_ok=True)
