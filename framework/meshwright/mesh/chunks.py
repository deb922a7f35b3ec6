"""Sizes of chunks of a matrix (logits) that a loss converts to float32, by device; even shares of a number."""

from __future__ import annotations

from torch import Tensor

from meshwright.kernels import device_kind

CPU_CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS = 2**22, 2**26
"""Elements of a matrix that a loss converts to float32 at a time: 16 MiB suit a CPU's cache, 256 MiB hide launches."""


def rows_per_chunk(matrix: Tensor) -> int:
    """Return the rows of a chunk of a matrix (rows, columns) for its device; meta tensors of dry runs count as CUDA."""
    elements = CPU_CHUNK_ELEMENTS if device_kind(matrix) == "cpu" else CUDA_CHUNK_ELEMENTS
    return max(1, elements // max(1, matrix.shape[1]))


def even_shares(total: int, size: int) -> list[int]:
    """Return ``total`` shared out evenly over ``size`` ranks, the rest to the first ones."""
    each, rest = divmod(total, size)
    return [each + (rank < rest) for rank in range(size)]
