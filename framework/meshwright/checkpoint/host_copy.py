"""Host staging memory for a rank's pieces of a checkpoint: allocated by the first save,
reused by all others.

    segment 0 | piece 0 |pad| piece 1 |pad| ... |      segment 1 | piece 7 |pad| ...

Pages of pinned memory are registered with the GPU when they are allocated. A buffer per tensor
would cost that in each save, and torch keeps freed pinned buffers, rounded up to powers of two, so
that both copies of the state might stay. Pieces arrive one by one, since each may be all-gathered;
their sum is unknown to the first save, hence segments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.checkpoint.shard import TensorPiece

SEGMENT_BYTES = 2**28
"""Bytes of a segment, unless one piece needs more. Memory that no piece reaches costs nothing,
unless it is pinned.
"""
_ALIGNMENT = 64
"""Bytes; a view of any dtype may begin at a multiple of its size."""


class HostSlab:
    """Host memory of one rank for the pieces of one save at a time."""

    def __init__(self) -> None:
        self._segments: list[Tensor] = []
        self._segment = self._offset = 0
        """Place of the next piece: the segment's number, and the byte in it."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(segment.numel() for segment in self._segments)

    def copy(self, pieces: Iterable[TensorPiece]) -> list[TensorPiece]:
        """Copy pieces into the slab, pinned where they come from a GPU. Blocks once,
        until all are copied.

        Overwrites the copies of the save before: its writer must have ended.
        """
        self._segment = self._offset = 0
        copies, seen_gpu = [], False
        for piece in pieces:
            from_gpu = piece.tensor.is_cuda
            copy = self._take(piece.tensor, pinned=from_gpu)
            copies.append(
                piece._replace(tensor=copy.copy_(piece.tensor.detach(), non_blocking=from_gpu))
            )
            seen_gpu = seen_gpu or from_gpu
        if seen_gpu:
            torch.cuda.synchronize()
        return copies

    def _take(self, tensor: Tensor, *, pinned: bool) -> Tensor:
        """Return the next free memory as a contiguous tensor of the shape and dtype
        of ``tensor``.
        """
        size = tensor.numel() * tensor.element_size()
        while self._segment < len(self._segments):
            segment = self._segments[self._segment]
            if self._offset + size <= segment.numel() and (not pinned or segment.is_pinned()):
                break
            self._segment, self._offset = self._segment + 1, 0
        else:
            self._segments.append(
                torch.empty(max(size, SEGMENT_BYTES), dtype=torch.uint8, pin_memory=pinned)
            )
        memory = self._segments[self._segment][self._offset : self._offset + size]
        self._offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory.view(tensor.dtype).view(tensor.shape)
