"""Boxes of a global tensor that one rank holds: of its whole slice, or of consecutive elements of it.

slice (4, 6) of this rank, elements [4, 15)      . . . . x x     box 0: rows 0:1, columns 4:6
                                                 x x x x x x     box 1: rows 1:2, columns 0:6
                                                 x x x . . .     box 2: rows 2:3, columns 0:3
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from meshwright.parameters import ParameterInfo


class LocalBox(NamedTuple):
    """A box of the global tensor that this rank holds,
    and the view of a local tensor with its elements.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor


def local_boxes(info: ParameterInfo, tensor: Tensor) -> Iterator[LocalBox]:
    """Yield the boxes of this rank's slice, one for each of its ranges. ``tensor``: local,
    without padding.
    """
    return _global_boxes(info, (0,) * tensor.dim(), tensor)


def flat_boxes(info: ParameterInfo, start: int, flat: Tensor) -> Iterator[LocalBox]:
    """Yield the boxes of the elements from ``start`` on of this rank's slice, without padding.

    Args:
        start: position of the first element in the flattened slice, padding included.
        flat: the elements, (n,).
    """
    at = 0
    for offset, shape in blocks(info.local_shape, start, start + flat.numel()):
        size = math.prod(shape)
        yield from _global_boxes(info, offset, flat[at : at + size].view(shape))
        at += size


def blocks(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the blocks that together are elements [start, stop) of a flattened
    tensor: at most 2 x dims - 1, each contiguous, in order.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row_size = math.prod(shape[1:])
    first, last = -(-start // row_size), stop // row_size
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row_size, stop - last * row_size)
        return
    if start < first * row_size:
        yield from _in_row(shape, first - 1, start - (first - 1) * row_size, row_size)
    if first < last:
        yield (first, *(0,) * len(shape[1:])), (last - first, *shape[1:])
    if last * row_size < stop:
        yield from _in_row(shape, last, 0, stop - last * row_size)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the blocks of elements [start, stop) of one row."""
    for offset, block_shape in blocks(shape[1:], start, stop):
        yield (row, *offset), (1, *block_shape)


def _global_boxes(
    info: ParameterInfo, offset: tuple[int, ...], block: Tensor
) -> Iterator[LocalBox]:
    """Yield the boxes of a block at ``offset`` of this rank's slice: one for each range of the
    slice that it meets, none of padding.
    """
    if info.slice is None:
        yield LocalBox(offset, tuple(block.shape), block)
        return
    dim, at = info.slice.dim, 0
    block_start, block_stop = offset[dim], offset[dim] + block.shape[dim]
    for start, stop in info.slice.ranges:
        low, high = max(block_start, at), min(block_stop, at + stop - start)
        if low < high:
            view = block.narrow(dim, low - block_start, high - low)
            place = (*offset[:dim], start + low - at, *offset[dim + 1 :])
            yield LocalBox(place, tuple(view.shape), view)
        at += stop - start
