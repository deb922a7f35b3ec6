"""Reader of checkpoints: find, check,
and read slices for any layout from the shards of any other.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.boxes import LocalBox, flat_boxes, local_boxes
from meshwright.checkpoint.check import intersection, parse
from meshwright.checkpoint.files import (
    checkpoints_directory,
    regular_size,
    retried,
    sha256_of,
    step_name,
)
from meshwright.checkpoint.in_store import file_opener, published
from meshwright.checkpoint.manifest import (
    MANIFEST,
    SUMS,
    Manifest,
    PieceEntry,
    TensorEntry,
    TensorKind,
    render_sums,
)
from meshwright.checkpoint.ranges import TensorFile
from meshwright.errors import CheckpointError, StoreAwayError, UnreadableError
from meshwright.parameters import ParameterInfo
from meshwright.system.bounded import MAX_MANIFEST_BYTES, read_bytes
from meshwright.system.process import map_in_daemon_threads
from meshwright.system.store import Place, StoreAccess, StoreError, StorePath
from meshwright.terminal.output import Warn, print_warning


class Candidate(NamedTuple):
    """A directory with the name of a checkpoint. ``open_checkpoint`` decides if it is sound."""

    step: int
    path: Place


def find(run_directory: Place) -> list[Candidate]:
    """Find all published checkpoints of a run by name, newest first.
    Temporary and set-aside ones are ignored.

    Raises:
        UnreadableError: The file system cannot be read.
    """
    directory = checkpoints_directory(run_directory)

    def read() -> list[Candidate]:
        if isinstance(directory, StorePath):
            access = StoreAccess()
            steps = [directory / name for name in access.names(directory) if _step_of(name) >= 0]
            found = [Candidate(_step_of(path.name), path) for path in published(steps, access)]
        else:
            found = [
                Candidate(_step_of(path.name), path)
                for path in (directory.iterdir() if directory.is_dir() else ())
                if _step_of(path.name) >= 0 and path.is_dir()
            ]
        return sorted(found, reverse=True)

    return retried(read, directory)


def _step_of(name: str) -> int:
    """Return the step of a directory with the name of a checkpoint; -1: it is none."""
    match = re.fullmatch(r"step-(\d{8,18})", name, flags=re.ASCII)
    return int(match[1]) if match and name == step_name(int(match[1])) else -1


def has_checkpoint(run_directory: Place, above: int = -1) -> bool:
    """Return True if the run has a checkpoint of a step > ``above``,
    or cannot read the directory of them.
    """
    try:
        return any(candidate.step > above for candidate in find(run_directory))
    except UnreadableError:
        return True


def open_checkpoint(path: Place) -> CheckpointReader:
    """Open a checkpoint after checking its manifest and the sizes of its files.
    ``verify`` checks the hashes.

    Cheap: reads only the manifest and the file sizes.

    Raises:
        CheckpointError: Every missing or truncated file.
    """
    if isinstance(path, Path) and path.is_symlink():
        raise CheckpointError(
            "MW-CHECKPOINT-010",
            f"{path}: is a symbolic link, to {path.readlink()}: give its target",
        )
    size_of = _sizes_in(path)
    text = _read_small(path / MANIFEST, size_of)
    sums = _read_small(path / SUMS, size_of)
    digest = hashlib.sha256(text).hexdigest()
    if not sums.startswith(digest.encode()):
        raise CheckpointError(
            "MW-CHECKPOINT-011",
            f"{path / MANIFEST}: its sha256 is not the one in {SUMS}: one of the two is damaged",
        )
    manifest = parse(text, str(path / MANIFEST))
    if sums != render_sums(digest, manifest.files):
        raise CheckpointError(
            "MW-CHECKPOINT-012",
            f"{path / SUMS}: does not have the hashes of the manifest: it is damaged",
        )
    name = re.fullmatch(r"step-(\d+)", path.name, flags=re.ASCII)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(
            "MW-CHECKPOINT-013",
            f"{path}: its manifest is of step {manifest.step}: rename the directory back",
        )
    problems = []
    for file, expected in sorted(manifest.files.items()):
        size = size_of(file)
        if size is None:
            problems.append(f"{path / file}: is missing (or no regular file)")
        elif size != expected.size:
            problems.append(f"{path / file}: {size} bytes, the manifest says {expected.size}")
    if problems:
        raise CheckpointError("MW-CHECKPOINT-014", "\n".join(problems))
    if isinstance(path, StorePath):
        sizes = {name: file.size for name, file in manifest.files.items()}
        return CheckpointReader(path, manifest, digest, file_opener(path, sizes, StoreAccess()))
    return CheckpointReader(path, manifest, digest)


def newest_valid(run_directory: Place, *, warn: Warn = print_warning) -> CheckpointReader | None:
    """Return the newest checkpoint that verifies, hashes included. For each skipped one,
    warn with the bad file.

    Returns None if the run has no checkpoint yet. Reads every byte of a checkpoint, so one rank
    calls it and broadcasts the step. The other ranks then use ``open_checkpoint`` and may compare
    ``digest``.

    Raises:
        CheckpointError: Checkpoints exist, but none verifies. Fresh weights would silently discard
            the run.
    """

    def read(path: Place) -> CheckpointReader:
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        return checkpoint

    return first_sound(run_directory, [each.path for each in find(run_directory)], read, warn)


Found = TypeVar("Found")


def first_sound(
    run_directory: Place, paths: Sequence[Place], read: Callable[[Place], Found], warn: Warn
) -> Found | None:
    """Return ``read(path)`` of the first checkpoint without a CheckpointError,
    or None if there are no checkpoints.

    ``warn`` is called for each skipped checkpoint.

    Raises:
        UnreadableError: A checkpoint cannot be read, although it may be sound.
        CheckpointError: Checkpoints exist, but none is sound.
    """
    failures = []
    for path in paths:
        try:
            return read(path)
        except UnreadableError:
            raise
        except CheckpointError as error:
            failures.append(error.message)
            warn(f"checkpoint {path.name} is skipped: {error}")
    if failures:
        raise CheckpointError(
            "MW-CHECKPOINT-015",
            f"{checkpoints_directory(run_directory)}: none of the {len(failures)} checkpoints"
            " verifies:\n"
            + "\n".join(failures)
            + "\nrestore a file from a copy; or move the directory away, or choose another"
            " run.name, to start anew",
        )
    return None


class CheckpointReader:
    """A published checkpoint, open for reading. Its shards stay memory-mapped until ``close``."""

    def __init__(
        self,
        path: Place,
        manifest: Manifest,
        digest: str,
        open_file: Callable[[str], TensorFile] | None = None,
    ) -> None:
        """Hold an open checkpoint. ``open_file``: function that opens the shard file of a name, such
        as a :class:`~.ranges.RangedFile`; None: it is mapped from ``path``.
        """
        self.path = path
        self.manifest = manifest
        self.digest = digest
        """sha256 of the manifest, and thereby of all files.
        Two ranks with equal digests read the same checkpoint.
        """
        self._open_file = self._map_file if open_file is None else open_file
        self._open: dict[str, TensorFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards."""
        self._open.clear()

    def open_files(self, names: Iterable[str]) -> None:
        """Open these files.

        Raises:
            CheckpointError: one is damaged, or missing.
        """
        for name in names:
            try:
                self._file(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    "MW-CHECKPOINT-031",
                    f"{self.path / name} cannot be opened: {error}; take another checkpoint",
                ) from error

    def verify(self, share: slice = slice(None)) -> None:
        """Verify the sha256 of every file.

        Args:
            share: Slice of the files sorted by name, when several processes divide the work.

        Raises:
            CheckpointError: Lists every file whose bytes differ from those written.
        """
        names = sorted(self.manifest.files)[share]
        found = map_in_daemon_threads(self._damage, names, min(8, os.cpu_count() or 1))
        problems = [
            f"{self.path / name}: {damage}"
            for name, damage in zip(names, found, strict=True)
            if damage
        ]
        if problems:
            raise CheckpointError("MW-CHECKPOINT-016", "\n".join(problems))

    def _damage(self, name: str) -> str | None:
        try:
            actual = sha256_of(self.path / name, self.manifest.files[name].size)
        except UnreadableError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return "is missing"
            raise
        if actual != self.manifest.files[name].sha256:
            return "its sha256 is not the one in the manifest: the file is damaged"
        return None

    def parameters(self, kind: TensorKind) -> list[str]:
        """Return the sorted names of the parameters that have a tensor of this kind here."""
        prefix = kind.of("")
        return sorted(
            name.removeprefix(prefix) for name in self.manifest.tensors if name.startswith(prefix)
        )

    def kinds(self) -> list[TensorKind]:
        """Return the kinds of tensors in this checkpoint, sorted."""
        return [
            TensorKind(name)
            for name in sorted({name.partition("/")[0] for name in self.manifest.tensors})
        ]

    def shape(self, kind: TensorKind, parameter: str) -> tuple[int, ...]:
        """Return the global shape of a tensor in this checkpoint."""
        return self.manifest.tensors[kind.of(parameter)].shape

    def read(
        self, kind: TensorKind, info: ParameterInfo, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Read this rank's part of a tensor in the present layout: ``info.local_shape``,
        padding zero, a copy on CPU.

        Only the intersecting slices are read from disk.

        Args:
            kind: Role of the tensor, such as weights or exp_avg.
            info: Parameter, with its global shape and this rank's slice.
            dtype: Dtype of the result; None: as stored.

        Returns:
            The tensor; None if the checkpoint has no tensors of this kind (a float32 run keeps no
            master weights).

        Raises:
            CheckpointError: The name is missing among others of its kind, or the global shape
                differs.
        """
        entry = self._entry(kind, info)
        if entry is None:
            return None
        local = torch.zeros(info.local_shape, dtype=entry.dtype.as_torch)
        for box in local_boxes(info, info.unpadded(local)):
            self._read_into(box, entry)
        return local if dtype is None else local.to(dtype)

    def read_range(
        self, kind: TensorKind, info: ParameterInfo, start: int, stop: int
    ) -> Tensor | None:
        """Read elements [start, stop) of this rank's flattened part of a tensor:
        (stop - start,) as stored, padding zero, a copy on CPU.

        Only the intersecting slices are read from disk. Returns None and raises as :meth:`read`
        does.
        """
        entry = self._entry(kind, info)
        if entry is None:
            return None
        flat = torch.zeros(stop - start, dtype=entry.dtype.as_torch)
        for box in flat_boxes(info, start, flat):
            self._read_into(box, entry)
        return flat

    def _entry(self, kind: TensorKind, info: ParameterInfo) -> TensorEntry | None:
        """Return the entry of a tensor of this model; None:
        the checkpoint has no tensors of its kind.
        """
        name = kind.of(info.name)
        entry = self.manifest.tensors.get(name)
        if entry is None:
            known = self.parameters(kind)
            if not known and kind != TensorKind.WEIGHTS:
                return None
            raise CheckpointError(
                "MW-CHECKPOINT-017",
                f"{self.path}: has no tensor {name!r}, which this model needs with shape"
                f" {list(info.global_shape)}; it has {len(known)} of that kind"
                f" ({', '.join(known[:3])}, ...): build the model that was saved, or choose another"
                " run.name",
            )
        if entry.shape != info.global_shape:
            raise CheckpointError(
                "MW-CHECKPOINT-018",
                f"{self.path}: the tensor {name!r} has shape {list(entry.shape)} in the checkpoint"
                f" and {list(info.global_shape)} in this model: give model.options the values that"
                " were saved, or choose another run.name",
            )
        return entry

    def read_box(
        self, kind: TensorKind, parameter: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Tensor:
        """Read the box ``[offset, offset + shape)`` of a tensor of this checkpoint, as stored,
        a copy on CPU. Only the intersecting slices are read from disk.
        """
        entry = self.manifest.tensors[kind.of(parameter)]
        box = torch.zeros(shape, dtype=entry.dtype.as_torch)
        self._read_into(LocalBox(offset, shape, box), entry)
        return box

    def _read_into(self, box: LocalBox, entry: TensorEntry) -> None:
        """Fill a box of a checkpoint's tensor, from all pieces that meet it."""
        for part in entry.pieces:
            common = intersection(box.offset, box.shape, part.offset, part.shape)
            if common is None:
                continue
            inside = tuple(
                slice(a - o, b - o) for (a, b), o in zip(common, box.offset, strict=True)
            )
            source = tuple(
                slice(a - o, b - o) for (a, b), o in zip(common, part.offset, strict=True)
            )
            box.tensor[inside].copy_(self._numbers(part, entry.dtype, source))

    def _numbers(self, part: PieceEntry, dtype: str, source: tuple[slice, ...]) -> Tensor:
        """Read the box ``source`` of one piece, in the piece's own coordinates."""
        place = f"{self.path / part.file}: tensor {part.key!r}"
        try:
            found = self._file(part.file).get_slice(part.key)
            shape, stored = tuple(found.get_shape()), found.get_dtype()
            if (shape, stored) != (part.shape, dtype):
                raise CheckpointError(
                    "MW-CHECKPOINT-019",
                    f"{place} is {stored}{list(shape)} in the file and {dtype}{list(part.shape)} in"
                    " the manifest: the two do not belong together; take another checkpoint",
                )
            numbers = found[source]
        except StoreError as error:
            if not error.is_passing:
                raise UnreadableError(
                    "MW-CHECKPOINT-041", f"{place} cannot be read: {error.strerror}"
                ) from error
            raise StoreAwayError(
                "MW-CHECKPOINT-042",
                f"{place} cannot be read: {error.strerror}. Run the same command again when the"
                " store answers",
            ) from error
        except (SafetensorError, OSError) as error:  # a file may be pruned while it is read
            raise CheckpointError(
                "MW-CHECKPOINT-020", f"{place} cannot be read: {error}; take another checkpoint"
            ) from error
        assert isinstance(numbers, Tensor)
        return numbers

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = self._open_file(name)
        return self._open[name]

    def _map_file(self, name: str) -> TensorFile:
        mapped: TensorFile = safe_open(str(self.path / name), framework="pt", device="cpu")
        return mapped


def _sizes_in(path: Place) -> Callable[[str], int | None]:
    """Return a function that returns the bytes of a checkpoint's file; None: it is missing.
    Of an object store one listing has all of them.
    """
    if isinstance(path, StorePath):
        found = retried(lambda: StoreAccess().names(path), path)
        return found.get
    return lambda name: regular_size(path / name)


def _read_small(path: Place, size_of: Callable[[str], int | None]) -> bytes:
    size = size_of(path.name)
    if size is None:
        raise CheckpointError("MW-CHECKPOINT-021", f"{path}: is missing (or no regular file)")
    if size > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            "MW-CHECKPOINT-022",
            f"{path}: {size} bytes, more than the limit of {MAX_MANIFEST_BYTES} for such a file",
        )
    if isinstance(path, StorePath):
        return retried(lambda: StoreAccess().read(path, 0, size), path)
    return retried(lambda: read_bytes(path, MAX_MANIFEST_BYTES), path)
