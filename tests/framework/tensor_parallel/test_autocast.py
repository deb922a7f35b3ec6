"""Linears under torch.autocast, in float32: whole numbers that bfloat16 holds,
so that all sums are exact.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from meshwright.pipeline.split_backward import SplitBackward, accumulate_deferred
from meshwright.tensor_parallel.layers import ColumnLinear, RowLinear
from meshwright_launch.pool import RankPool
from tests.framework.tensor_parallel.ranks_of_tp import held, part, summed, tp_group

B, S, I = 2, 4, 8  # noqa: E741


class Block(nn.Module):
    """Two linears that compute in bfloat16 and return float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(I, I)
        self.down = nn.Linear(I, I)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.down(torch.relu(self.up(x)))
        assert y.dtype == torch.bfloat16
        return y.to(x.dtype)


def whole_numbers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def drawn_block() -> Block:
    block = Block()
    for seed, parameter in enumerate(block.parameters()):
        parameter.data.copy_(whole_numbers(seed, *parameter.shape))
    return block


def run(block: Block, x: Tensor, gradient: Tensor, splits: bool) -> list[Tensor]:
    """Return the output and the gradient of x; parameters keep theirs in ``.grad``."""
    x, split = x.clone().requires_grad_(), SplitBackward()
    with split if splits else nullcontext():
        y = block(x)
    with split.deferring() as notes:
        y.backward(gradient)
    assert not notes
    accumulate_deferred(notes)
    assert x.grad is not None
    return [y, x.grad]


def autocast_rank(rank: int, tp: int, sequence: bool, splits: bool) -> None:
    plain = drawn_block()
    block, group = copy.deepcopy(plain), tp_group(rank, tp)
    if tp > 1:
        block.up = ColumnLinear(block.up, group, sequence)
        block.down = RowLinear(block.down, group, sequence)
    x, gradient = whole_numbers(8, B, S, I), whole_numbers(9, B, S, I)
    local_x, local_gradient = (
        part(whole, 1, rank, tp) if sequence else whole for whole in (x, gradient)
    )
    expected = run(plain, x, gradient, splits=False)
    for found, whole in zip(run(block, local_x, local_gradient, splits), expected, strict=True):
        assert torch.equal(found, part(whole, 1, rank, tp) if sequence else whole)
    for name, parameter in plain.named_parameters():
        local = block.get_parameter(name).grad
        assert parameter.grad is not None and local is not None and parameter.grad.abs().sum() > 0
        layer, key = name.split(".")
        slice_ = getattr(block.get_submodule(layer), "slices", {}).get(key)
        if slice_ is None:
            assert torch.equal(summed(local) if sequence else local, parameter.grad)
        else:
            assert torch.equal(local, held(parameter.grad, slice_))


@pytest.mark.parametrize(
    ("tp", "sequence", "splits"), [(1, False, True), (2, False, False), (2, True, True)]
)
def test_linears_in_autocast_equal_the_plain_ones(
    pool: RankPool, tp: int, sequence: bool, splits: bool
) -> None:
    """Split over tp and within a split backward, whose weights' gradients are then part of I."""
    pool.run(autocast_rank, tp, sequence, splits)
