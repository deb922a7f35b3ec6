"""Boxes of consecutive elements of a slice: those of all ranks together are the tensor, each element once."""

from __future__ import annotations

import math
import random

import pytest
import torch

from meshwright.checkpoint.boxes import blocks, flat_boxes
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders, Tie
from meshwright.parameters import ParameterInfo, Slice

SHAPES = [(), (7,), (1, 1), (5, 3), (4, 1, 6), (3, 4, 5), (2, 3, 2, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_of_every_range(shape: tuple[int, ...]) -> None:
    """Blocks are disjoint, in order, contiguous in memory, and no more than 2 x dims - 1."""
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = [_at(whole, *block) for block in blocks(shape, start, stop)]
            elements = [element for block in found for element in block.flatten().tolist()]
            assert elements == list(range(start, stop))
            assert all(block.is_contiguous() for block in found)
            assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("seed", range(40))
def test_shares_of_all_ranks_cover_a_tensor_once(seed: int) -> None:
    """A tensor cut over some tp ranks, in several ranges and with padding; each rank's slice
    written in parts by ranks with copies of it.
    """
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 4)))
    dim = draw.randrange(len(shape))
    whole = torch.randn(shape)
    written = torch.zeros(shape)
    times = torch.zeros(shape)
    for slice_ in _slices(draw, shape[dim], dim):
        info = ParameterInfo("w", shape, slice_)
        local = info.take(whole).flatten()
        cuts = sorted(draw.randint(0, local.numel()) for _ in range(draw.randint(0, 4)))
        for start, stop in zip([0, *cuts], [*cuts, local.numel()], strict=True):
            for box in flat_boxes(info, start, local[start:stop]):
                assert tuple(box.tensor.shape) == box.shape and 0 not in box.shape
                _at(written, box.offset, box.shape).copy_(box.tensor)
                _at(times, box.offset, box.shape).add_(1)
    assert torch.equal(written, whole)
    assert torch.equal(times, torch.ones(shape))


@pytest.mark.parametrize(
    ("shards", "copies", "over_tp"), [(1, 1, 1), (1, 6, 1), (4, 1, 2), (2, 3, 1), (2, 2, 4)]
)
@pytest.mark.parametrize("numel", [0, 8, 24, 16 * 31])
def test_saved_ranges_divide_a_bucket_evenly(
    shards: int, copies: int, over_tp: int, numel: int
) -> None:
    """Every holder writes 1/n of a bucket, inside its own shard."""
    ranges = []
    for shard in range(shards):
        for copy in range(copies):
            for tp_rank in range(over_tp):
                holders = Holders(
                    shard_group=_group(shards, shard),
                    copies_group=_group(copies, copy),
                    copied_over=(_group(over_tp, tp_rank),),
                )
                start, stop = holders.saved_range(numel)
                first, last = holders.range_of(numel)
                assert first <= start <= stop <= last
                ranges.append((start, stop))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 2
    elements = [element for start, stop in ranges for element in range(start, stop)]
    assert sorted(elements) == list(range(numel))


def test_a_tied_weight_is_written_by_its_first_stage() -> None:
    """The ranks of the other stages write none of it."""
    for is_first in (True, False):
        holders = Holders(
            copies_group=_group(2, 1), tied=Tie("embedding", _group(2, 0), is_first=is_first)
        )
        assert holders.saved_range(10) == ((5, 10) if is_first else (5, 5))


def _group(size: int, rank: int) -> Group:
    return Group("test", tuple(range(size)), rank)


def _at(whole: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the box of a tensor."""
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def _slices(draw: random.Random, size: int, dim: int) -> list[Slice | None]:
    """Return the slices of all ranks: the tensor whole, rows in a row with padding at the end,
    or every second row.
    """
    kind = draw.choice(["whole", "padded", "several"])
    if kind == "whole":
        return [None]
    if kind == "padded":
        ranks = draw.randint(1, 4)
        length = -(-size // ranks)
        starts = [min(rank * length, size) for rank in range(ranks)]
        return [Slice(dim, start, min(start + length, size), length) for start in starts]
    of_ranks = [range(first, size, 2) for first in (0, 1) if first < size]
    return [
        Slice(dim, rows[0], rows[-1] + 1, len(rows), tuple((row, row + 1) for row in rows))
        for rows in of_ranks
    ]
