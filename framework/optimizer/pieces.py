"""Flat tensors in pieces: they bound the temporary memory of an update that no fused kernel does."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TOGETHER = {"cpu": 2**20, "cuda": 2**26}
"""Elements updated at a time, by device: a CPU's cache holds few; on CUDA each piece costs some kernel launches."""


def pieces_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same elements of tensors (numel,), :data:`TOGETHER` at a time."""
    size = TOGETHER.get(tensors[0].device.type, TOGETHER["cpu"])
    yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)
