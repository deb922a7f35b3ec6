"""What the tests of this room run inside a rank: the tp group, and pieces of whole tensors."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.mesh.comm import Group
from meshwright.mesh.traffic import Traffic
from meshwright.parameters import Slice

ModuleType = TypeVar("ModuleType", bound=nn.Module)


def tp_group(rank: int, tp: int) -> Group:
    """Return all ranks of the world as one tp group."""
    return Group("tp", tuple(range(tp)), rank, dist.group.WORLD, Traffic())


def lonely_group(rank: int, tp: int) -> Group:
    """Return a place in a tp group that cannot talk:
    enough for all that is decided before anyone speaks.
    """
    return Group("tp", tuple(range(tp)), rank, None, Traffic())


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same random tensor on every rank."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def part(whole: Tensor, dim: int, rank: int, tp: int) -> Tensor:
    """My equal part of a tensor that all ranks hold."""
    return whole.chunk(tp, dim)[rank]


def held(whole: Tensor, slice_: Slice | None) -> Tensor:
    """Return the rows or columns of a whole tensor that a slice names, without padding."""
    return (
        whole
        if slice_ is None
        else whole.narrow(slice_.dim, slice_.start, slice_.stop - slice_.start)
    )


def padding(local: Tensor, slice_: Slice) -> Tensor:
    """Return the rows of a local tensor beyond its slice."""
    length = slice_.stop - slice_.start
    return local.narrow(slice_.dim, length, slice_.padded - length)


def fill(module: ModuleType, seed: int = 0) -> ModuleType:
    """Give every parameter random values, the same on every rank."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed * 1000 + index))
    return module


def summed(partial: Tensor) -> Tensor:
    """Return the sum of everyone's tensor."""
    partial = partial.clone()
    dist.all_reduce(partial)
    return partial


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12, what: str = "") -> None:
    """Equal shapes and values, relative to the largest value."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if want.numel() == 0:
        return
    error = (got - want).abs().max() / want.abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"{what} relative error {error:.2e} > {tolerance:.0e}"
