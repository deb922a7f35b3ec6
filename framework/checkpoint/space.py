"""Whether checkpoints will fit on the disk: told before any rank starts, and not when the first one is written.

    bfloat16   weights 2 + master 4 + exp_avg 4 + exp_avg_sq 4 = 14 bytes for each parameter
    float32    weights 4            + exp_avg 4 + exp_avg_sq 4 = 12
    float64    weights 8            + exp_avg 8 + exp_avg_sq 8 = 24
    with SGD   momentum in place of the two moments
    frozen     weights alone; so for buffers that forward changes

The headers of the files and the manifest come on top, about a kilobyte for each tensor. What the file system says is
believed: a quota is not seen, nor what others will write meanwhile.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.checkpoint.files import Warn, checkpoints_directory, to_stderr
from meshwright.checkpoint.read import find
from meshwright.errors import ConfigError

BYTES_PER_TENSOR = 512
"""Of header and manifest, for one tensor of one kind."""


class Weight(NamedTuple):
    """One tensor of the model, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


def checkpoint_bytes(weights: Iterable[Weight], num_states: int) -> int:
    """What one checkpoint of them takes, on any layout. ``num_states``: what the optimizer keeps of each element."""
    total = 0
    for shape, dtype, trained in weights:
        numel, itemsize, tensors = math.prod(shape), dtype.itemsize, 1
        if trained:
            summed = max(itemsize, 4)  # gradients, moments and master weights are float32, or float64
            copies = num_states + (itemsize != summed)
            itemsize, tensors = itemsize + copies * summed, tensors + copies
        total += numel * itemsize + tensors * BYTES_PER_TENSOR
    return total


def check_space(run_directory: Path, one: int, *, keep_last: int, steps: int, warn: Warn = to_stderr) -> None:
    """Refuse a run whose next checkpoint, of ``one`` bytes, does not fit; warn when those it is to keep do not.

    While one is written the ``keep_last`` before it are still there. A run that has taken its ``steps`` saves none.

    Raises:
        ConfigError: with the bytes that are needed, those that are free, and where.
    """
    kept = find(run_directory)[:keep_last]
    if kept and kept[0].step >= steps:
        return
    disk = shutil.disk_usage(run_directory)
    if disk.total == 0:  # a file system that does not tell
        return
    directory = checkpoints_directory(run_directory)
    dead = sum(size_of_directory(path) for path in directory.glob(".tmp-*"))  # the next save removes them
    free = disk.free + dead
    if free < one:
        raise ConfigError(
            f"{run_directory} has {free:,} bytes free, and one checkpoint of this run takes {one:,}: free "
            f"{one - free:,} bytes there, or choose a run.directory on another disk"
        )
    there = sum(size_of_directory(candidate.path) for candidate in kept)
    needed = (keep_last + 1) * one - there
    if free < needed:
        warn(
            f"{run_directory} has {free:,} bytes free, and checkpoint.keep_last = {keep_last} takes {needed:,} more, "
            f"with the one that is being written: free {needed - free:,} bytes there, lower checkpoint.keep_last, or "
            f"choose a run.directory on another disk"
        )


def size_of_directory(path: Path) -> int:
    """Bytes of the files right below; one that goes meanwhile counts no more."""
    total = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass
    return total
