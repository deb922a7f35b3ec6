"""Checks of a run's checkpoints before any rank starts, instead of at the first save:
their manifest and disk space.

    16 bits    weights 2 + master 4 + exp_avg 4 + exp_avg_sq 4 = 14 bytes for each parameter
    float32    weights 4            + exp_avg 4 + exp_avg_sq 4 = 12
    float64    weights 8            + exp_avg 8 + exp_avg_sq 8 = 24
    with SGD   momentum in place of the two moments
    frozen     weights alone; the same for buffers that forward changes

File headers and the manifest add about a kilobyte per tensor. The free space is as reported by the
file system. It does not include quotas or later writes of other programs.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.checkpoint.check import parse
from meshwright.checkpoint.files import checkpoints_directory
from meshwright.checkpoint.manifest import (
    MANIFEST,
    CheckpointMetadata,
    Dtype,
    FileEntry,
    PieceEntry,
    TensorEntry,
    TensorKind,
    render,
)
from meshwright.checkpoint.read import find
from meshwright.checkpoint.save import merge
from meshwright.checkpoint.shard import ShardReport
from meshwright.errors import CheckpointError, ConfigError
from meshwright.terminal.output import Warn, print_warning

BYTES_PER_TENSOR = 512
"""Bytes of header and manifest for one tensor of one kind."""


class SavedTensor(NamedTuple):
    """Name, global shape and dtype of one tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


def check_manifest(metadata: CheckpointMetadata, weights: Iterable[SavedTensor]) -> None:
    """Write and read back, in memory, the manifest of a checkpoint with these weights.

    Raises:
        ConfigError: The manifest cannot be written or read back; the message contains the reason.
    """
    file = "pp0-dp0-tp0-00000.safetensors"
    tensors: dict[str, TensorEntry] = {}
    try:
        for weight in weights:
            dtype = Dtype.of(weight.dtype)
            if dtype is None:
                raise CheckpointError(
                    "MW-RUN-026",
                    f"tensor {weight.name!r}: a checkpoint cannot hold dtype {weight.dtype}",
                )
            key, offset = TensorKind.WEIGHTS.of(weight.name), (0,) * len(weight.shape)
            whole = PieceEntry(file=file, key=key, offset=offset, shape=weight.shape)
            pieces = (whole,) if math.prod(weight.shape) else ()
            tensors[key] = TensorEntry(shape=weight.shape, dtype=dtype, pieces=pieces)
        report = ShardReport(tensors=tensors, files={file: FileEntry(size=0, sha256="0" * 64)})
        manifest = merge(metadata, [report])
        is_same = parse(render(manifest), MANIFEST) == manifest
    except (CheckpointError, ValueError, RecursionError) as error:
        # pydantic's ValidationError is a ValueError
        raise ConfigError(
            "MW-RUN-027", f"a checkpoint of this run could not be written and read back:\n  {error}"
        ) from error
    if not is_same:
        raise ConfigError(
            "MW-RUN-028",
            "a checkpoint of this run could not be read back: its manifest would not be the same",
        )


def checkpoint_bytes(
    weights: Iterable[SavedTensor], num_states: int, bytes_per_tensor: int = BYTES_PER_TENSOR
) -> int:
    """Return the bytes of one checkpoint, in any layout. ``num_states``:
    optimizer states per trained element; ``bytes_per_tensor``: of headers and manifest.
    """
    total = 0
    for _, shape, dtype, trained in weights:
        numel, itemsize, tensors = math.prod(shape), dtype.itemsize, 1
        if trained:
            # gradients, moments and master weights are float32, or float64
            summed = max(itemsize, 4)
            copies = num_states + (itemsize != summed)
            itemsize, tensors = itemsize + copies * summed, tensors + copies
        total += numel * itemsize + tensors * bytes_per_tensor
    return total


def check_space(
    run_directory: Path, one: int, *, keep_last: int, steps: int, warn: Warn = print_warning
) -> None:
    """Refuse a run whose next checkpoint does not fit on the disk.
    Warn if the checkpoints to keep do not fit.

    During a save the ``keep_last`` earlier checkpoints still exist. A finished run needs no space.

    Args:
        run_directory: Directory of the run.
        one: Bytes of one checkpoint.
        keep_last: Number of checkpoints to keep.
        steps: Last step of the run.
        warn: Receives the warning.

    Raises:
        ConfigError: The required bytes, the free bytes and the directory.
    """
    newest = find(run_directory)[:keep_last]
    if newest and newest[0].step >= steps:
        return
    disk = shutil.disk_usage(run_directory)
    if disk.total == 0:  # the file system reports no size
        return
    directory = checkpoints_directory(run_directory)
    # the next save removes them
    dead = sum(size_of_directory(path) for path in directory.glob(".tmp-*"))
    free = disk.free + dead
    if free < one:
        raise ConfigError(
            "MW-CHECKPOINT-029",
            f"{run_directory} has {free:,} bytes free, and one checkpoint of this run takes"
            f" {one:,}: free {one - free:,} bytes there, or choose a run.directory on another disk",
        )
    present = sum(size_of_directory(candidate.path) for candidate in newest)
    needed = (keep_last + 1) * one - present
    if free < needed:
        warn(
            f"{run_directory} has {free:,} bytes free, and checkpoint.keep_last = {keep_last} takes"
            f" {needed:,} more, with the one that is being written: free {needed - free:,} bytes"
            " there, lower checkpoint.keep_last, or choose a run.directory on another disk"
        )


def size_of_directory(path: Path) -> int:
    """Return the total bytes of the files directly in a directory.
    Counting stops if a file disappears meanwhile.
    """
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            total += entry.stat(follow_symlinks=False).st_size
    return total
