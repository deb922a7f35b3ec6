"""Mirror of a run in host memory: a checkpoint of the last step, in a file system that is memory.

    /dev/shm/.../
      even/ odd/     steps in turns: the last one is complete while the next one is written
        pp0-dp0-tp0.safetensors   boxes of one rank; mapped by its first write, then overwritten in place
        pp0-dp0-tp0.shard.json    report of its tensors, written with the file
        pp0-dp0-tp0.step.json     step and counters; removed before the boxes change, written after

The boxes are those of a checkpoint on disk (``run/pieces.py``), and so is their reader: any layout can
read them. Nothing is hashed or synced: the mirror outlives the ranks, not their launcher.

NOTE [one step on all ranks]: a rank writes step k + 1 after all ranks have taken it, and takes step
k + 2 only together with ranks that have written k + 1. So from the first step on, the marks of all
ranks are equal for one step at least. Marks of different launches of ranks are never combined: on devices
whose sums vary, the same step taken twice has different bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from meshwright.checkpoint.check import check
from meshwright.checkpoint.manifest import CheckpointMetadata, FileEntry, Int64, StrictModel
from meshwright.checkpoint.read import CheckpointReader
from meshwright.checkpoint.save import merge
from meshwright.checkpoint.shard import (
    REPORT_SUFFIX,
    ShardReport,
    TensorPiece,
    describe,
    lay_out,
)
from meshwright.errors import CheckpointError
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import MAX_MANIFEST_BYTES, read_bytes

SLOTS = ("even", "odd")
MARK_SUFFIX = ".step.json"
NO_HASH = "0" * 64


class StepMark(StrictModel):
    """Mark of a complete mirror of one rank: metadata of the step, in plain JSON."""

    generation: Int64
    """Number of the launch of this run's ranks that wrote it."""
    step: Int64
    samples_seen: Int64
    seed: Int64
    config: dict[str, object]
    data_fingerprint: dict[str, str]
    state: dict[str, object]

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


class _Slot(NamedTuple):
    """File of one slot: the pieces that it was laid out for, and where their boxes are in memory."""

    pieces: list[tuple[str, int | None, torch.dtype, int]]
    targets: list[Tensor]


class MirrorWriter:
    """Writer of one rank's mirror. Holds two maps of its boxes."""

    def __init__(self, directory: Path, shard_name: str, generation: int = 0) -> None:
        """Write below ``directory`` as ``shard_name``; ``generation``: see :class:`StepMark`."""
        self._directory, self._shard_name = directory, shard_name
        self._generation = generation
        self._slots: dict[str, _Slot] = {}

    def write(self, head: CheckpointMetadata, pieces: Iterable[TensorPiece]) -> None:
        """Copy this rank's pieces of a step, then mark the step as complete. Blocks.

        Raises:
            OSError: the memory is full. The run cannot resume from this step then.
        """
        name = SLOTS[head.step % 2]
        folder = self._directory / name
        mark = folder / f"{self._shard_name}{MARK_SUFFIX}"
        mark.unlink(missing_ok=True)
        held = list(pieces)
        layout = [
            (piece.kind.of(piece.info.name), piece.start, piece.tensor.dtype, piece.num_bytes)
            for piece in held
        ]
        slot = self._slots.get(name)
        if slot is None or slot.pieces != layout:
            slot = self._slots[name] = _Slot(layout, self._lay_out(folder, held))
        views = (box.tensor for piece in held if piece.num_bytes for box in piece.boxes())
        for target, view in zip(slot.targets, views, strict=True):
            target.copy_(view)
        done = StepMark(generation=self._generation, **head._asdict())
        write_atomic(mark, done.model_dump_json(), is_durable=False)

    def clear(self) -> None:
        """Remove this rank's files, and free its maps."""
        self._slots.clear()
        for path in self._directory.glob(f"*/{self._shard_name}.*"):
            path.unlink(missing_ok=True)

    def _lay_out(self, folder: Path, pieces: Sequence[TensorPiece]) -> list[Tensor]:
        """Make and map the file for these pieces, and its report. Return the memory of each box."""
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{self._shard_name}.safetensors"
        described = [describe(piece, path.name) for piece in pieces]
        boxes = {key: view for _, _, views in described for key, view in views.items()}
        header, ordered = lay_out(boxes)
        # of boxes, which have no padding
        size = len(header) + sum(box.numel() * box.element_size() for box in ordered.values())
        path.unlink(missing_ok=True)  # of a process that has died
        with path.open("xb") as file:
            file.write(header)
            file.flush()
            # reserved now: a write to a map of a full file system would kill the process
            os.posix_fallocate(file.fileno(), 0, size)
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        targets: dict[str, Tensor] = {}
        at = len(header)
        for key, box in ordered.items():
            stop = at + box.numel() * box.element_size()
            targets[key] = memory[at:stop].view(box.dtype).view(box.shape)
            at = stop
        report = ShardReport(
            tensors={name: entry for name, entry, _ in described},
            files={path.name: FileEntry(size=size, sha256=NO_HASH)},
        )
        place = folder / f"{self._shard_name}{REPORT_SUFFIX}"
        write_atomic(place, report.model_dump_json(), is_durable=False)
        return [targets[key] for key in boxes]


def newest_step(directory: Path) -> int:
    """Return the newest step that any rank has mirrored; 0: none. It need not be complete."""
    steps = [0]
    for mark in directory.glob(f"*/*{MARK_SUFFIX}"):
        with contextlib.suppress(OSError, ValidationError):
            found = StepMark.model_validate_json(read_bytes(mark, MAX_MANIFEST_BYTES))
            steps.append(found.step)
    return max(steps)


def open_mirror(directory: Path, shard_names: Sequence[str]) -> CheckpointReader | None:
    """Open the newest step that all ranks have mirrored; None: there is none.

    ``shard_names``: those of all ranks, in order.

    Raises:
        CheckpointError: the mirror is damaged.
    """
    found = {slot: _marks_of(directory / slot, shard_names) for slot in SLOTS}
    complete = {slot: marks for slot, marks in found.items() if marks}
    if not complete:
        return None
    # a later launch may have gone back to a checkpoint of an earlier step
    slot = max(complete, key=lambda each: (complete[each][0].generation, complete[each][0].step))
    folder, marks = directory / slot, complete[slot]
    reports = [
        ShardReport.model_validate_json(
            read_bytes(folder / f"{name}{REPORT_SUFFIX}", MAX_MANIFEST_BYTES)
        )
        for name in shard_names
    ]
    manifest = merge(_head_of(marks), reports)
    problems = check(manifest)
    if problems:
        raise CheckpointError(
            "MW-CHECKPOINT-030",
            "\n".join(f"{folder}: {problem}" for problem in problems[:20])
            + "\nthe mirror in memory is left out; resume from the last checkpoint",
        )
    digest = hashlib.sha256("".join(mark.model_dump_json() for mark in marks).encode())
    reader = CheckpointReader(folder, manifest, digest.hexdigest())
    reader.open_files()
    return reader


def _marks_of(folder: Path, shard_names: Sequence[str]) -> list[StepMark]:
    """Return the marks of all ranks in a slot; none: they are not all of one step and launch."""
    try:
        marks = [
            StepMark.model_validate_json(
                read_bytes(folder / f"{name}{MARK_SUFFIX}", MAX_MANIFEST_BYTES)
            )
            for name in shard_names
        ]
    except (OSError, ValidationError):
        return []
    steps = {(mark.step, mark.generation) for mark in marks}
    return marks if len(steps) == 1 else []


def _head_of(marks: Sequence[StepMark]) -> CheckpointMetadata:
    """Return the metadata of a step: that of rank 0, and the state that a single rank has added."""
    state: dict[str, object] = {}
    for mark in reversed(marks):
        state |= mark.state
    return marks[0].head._replace(state=state)
