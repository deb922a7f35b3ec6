"""The copies of a save lie in memory that the first save allocated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import meshwright
from meshwright.checkpoint import HostSlab, TensorKind, TensorPiece, host_copy
from meshwright.checkpoint.host_copy import SEGMENT_BYTES
from meshwright.parameters import ParameterInfo
from meshwright_launch.python import OpenRun
from tests.launch.test_python import made

SHAPES = [
    ((3, 5), torch.float32),
    ((), torch.float64),
    ((7,), torch.bfloat16),
    ((0, 4), torch.float32),
]
SHAPES += [((11,), torch.bool), ((2, 2), torch.complex64), ((40,), torch.int64)]


def pieces(seed: int) -> Iterator[TensorPiece]:
    generator = torch.Generator().manual_seed(seed)
    for number, (shape, dtype) in enumerate(SHAPES):
        tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
        yield TensorPiece(TensorKind.WEIGHTS, ParameterInfo(str(number), shape), tensor)


def check_apart(tensors: list[Tensor]) -> None:
    """Fail if two tensors share a byte."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()
    )
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(("segment_bytes", "allocated"), [(128, [128] * 3 + [320]), (4096, [4096])])
def test_copies_are_equal_and_reuse_the_memory(segment_bytes: int, allocated: list[int]) -> None:
    slab = HostSlab()
    with mock.patch.object(host_copy, "SEGMENT_BYTES", segment_bytes):
        first = [copy.tensor for copy in slab.copy(pieces(1))]
        check_apart(first)
        places = [copy.data_ptr() for copy in first]
        assert [
            segment.numel() for segment in slab._segments
        ] == allocated and slab.num_bytes == sum(allocated)
        with mock.patch("torch.empty", side_effect=AssertionError("a second allocation")):
            second = slab.copy(pieces(2))
    assert [copy.tensor.data_ptr() for copy in second] == places
    for copy, piece in zip(second, pieces(2), strict=True):
        assert copy.info == piece.info and copy.tensor.dtype == piece.tensor.dtype
        assert torch.equal(copy.tensor, piece.tensor) and copy.tensor.is_contiguous()


def test_a_longer_save_adds_memory_and_keeps_the_first() -> None:
    slab = HostSlab()
    with mock.patch.object(host_copy, "SEGMENT_BYTES", 1024):
        slab.copy(pieces(1))
        large = TensorPiece(
            TensorKind.WEIGHTS, ParameterInfo("large", (5000,)), torch.arange(5000.0)
        )
        copies = slab.copy([*pieces(2), large])
    assert slab.num_bytes == 1024 + 20_000
    check_apart([copy.tensor for copy in copies])
    assert torch.equal(copies[-1].tensor, large.tensor)


def test_saves_of_a_run_share_one_allocation(tmp_path: Path) -> None:
    slabs: list[HostSlab] = []

    def save(run: OpenRun) -> list[int]:
        run.take_step()
        run.save()
        (slab,) = {id(slab): slab for slab in slabs}.values()
        return [segment.data_ptr() for segment in slab._segments]

    copy = HostSlab.copy
    noted = mock.patch.object(
        HostSlab, "copy", lambda slab, found: (slabs.append(slab), copy(slab, found))[1]
    )
    with noted, meshwright.open_run(made(tmp_path)) as run:
        first = save(run)
        assert len(first) == 1 and slabs[0].num_bytes == SEGMENT_BYTES
        assert save(run) == first and len(slabs) == 2
