"""The regions against their definition, on real ranks: values, gradients, bytes;
traps of in-place sums.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from meshwright.mesh.comm import Group
from meshwright.tensor_parallel import regions
from meshwright.tensor_parallel.plan import apply
from meshwright_launch.pool import RankPool
from tests.framework.tensor_parallel.ranks_of_tp import (
    close,
    drawn,
    fill,
    lonely_group,
    part,
    tp_group,
)

B, S, D = 3, 8, 5


def of_rank(rank: int, *shape: int) -> Tensor:
    return drawn(*shape, seed=100 + rank)


def backward(
    x: Tensor, region: Callable[[Tensor], Tensor], gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """(value of the region, gradient of x)."""
    x = x.detach().requires_grad_()
    y = region(x)
    y.backward(gradient)
    assert x.grad is not None
    return y.detach(), x.grad


def regions_rank(rank: int, tp: int) -> dict[str, object]:
    group = tp_group(rank, tp)
    whole_bytes = B * S * D * 8
    parts = {r: of_rank(r, B, S // tp, D) for r in range(tp)}
    wholes = {r: of_rank(r, B, S, D) for r in range(tp)}
    total = torch.stack(list(wholes.values())).sum(0)
    gathered = torch.cat(list(parts.values()), 1)

    y, dx = backward(drawn(B, S, D), lambda x: regions.copy_in(x, group), wholes[rank])
    close(y, drawn(B, S, D))
    close(dx, total)

    y, dx = backward(wholes[rank], lambda x: regions.reduce_out(x, group), drawn(B, S, D))
    close(y, total)
    close(dx, drawn(B, S, D))

    y, dx = backward(parts[rank], lambda x: regions.gather_sequence(x, group), wholes[rank])
    assert y.is_contiguous()
    close(y, gathered)
    close(dx, part(total, 1, rank, tp))

    y, dx = backward(wholes[rank], lambda x: regions.reduce_scatter_sequence(x, group), parts[rank])
    assert y.is_contiguous()
    close(y, part(total, 1, rank, tp))
    close(dx, gathered)

    return {
        "whole_bytes": whole_bytes,
        "counts": {
            operation: tuple(counted) for (_, operation), counted in group.traffic.counts.items()
        },
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_regions_do_what_they_say_and_count_their_bytes(pool: RankPool, tp: int) -> None:
    for told in pool.run(regions_rank, tp):
        whole = told["whole_bytes"]
        assert told["counts"] == {
            "all_reduce": (2, 2 * 2 * whole * (tp - 1) / tp),
            "all_gather": (2, 2 * whole * (tp - 1) / tp),
            "reduce_scatter": (2, 2 * whole * (tp - 1) / tp),
        }


def rows_rank(rank: int, tp: int) -> None:
    """Check regions on tokens of all samples in dim 0: a rank gets its own rows back."""
    group, rows = tp_group(rank, tp), 6
    parts = {r: of_rank(r, rows, D) for r in range(tp)}
    wholes = {r: of_rank(r, rows * tp, D) for r in range(tp)}
    total = torch.stack(list(wholes.values())).sum(0)
    y, dx = backward(parts[rank], lambda x: regions.gather_sequence(x, group), wholes[rank])
    close(y, torch.cat(list(parts.values())))
    close(dx, part(total, 0, rank, tp))
    y, dx = backward(wholes[rank], lambda x: regions.reduce_scatter_sequence(x, group), parts[rank])
    close(y, part(total, 0, rank, tp))
    close(dx, torch.cat(list(parts.values())))


def test_rows_of_tokens_come_back_to_their_rank(pool: RankPool) -> None:
    pool.run(rows_rank, 2)


class Mixer(nn.Module):
    """Token mixer that returns more than one value, as attention of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fill(nn.Linear(D, D, dtype=torch.float64))

    def forward(self, *, hidden: Tensor, table: Tensor) -> tuple[Tensor, None]:
        return self.inner(hidden).cumsum(1) * table, None


def mixer_rank(rank: int, tp: int, *, sequence: bool) -> None:
    group, table = tp_group(rank, tp), drawn(S, 1, seed=1)
    plain, split = Mixer(), Mixer()
    model = nn.Sequential(nn.Embedding(4, D), split, nn.Linear(D, 4))
    plan = {"0": "vocab", "1": "gather_cut", "2": "vocab"}
    infos = apply(model, plan, [], group, sequence, {})
    assert infos["1.inner.weight"].is_partial == sequence
    x, gradient = drawn(B, S, D), drawn(B, S, D, seed=2)
    mine, its = (part(each, 1, rank, tp) if sequence else each for each in (x, gradient))
    y, dx = backward(x, lambda x: plain(hidden=x, table=table)[0], gradient)
    of_rank, dx_of_rank = backward(mine, lambda x: split(hidden=x, table=table)[0], its)
    weight = split.inner.weight.grad
    assert weight is not None
    if sequence:
        y, dx = (part(each, 1, rank, tp) for each in (y, dx))
        weight = regions.reduce_out(weight, group)
    close(of_rank, y)
    close(dx_of_rank, dx)
    close(weight, plain.inner.weight.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_module_that_mixes_tokens_sees_all_of_them(pool: RankPool, sequence: bool) -> None:
    pool.run(partial(mixer_rank, sequence=sequence), 2)


def strided_rank(rank: int, tp: int) -> None:
    """What is summed, or arrives to be summed, is a transposed view or an expanded number."""
    group = tp_group(rank, tp)
    total = torch.stack([of_rank(r, B, D, S) for r in range(tp)]).sum(0).transpose(1, 2)
    mine = of_rank(rank, B, D, S).transpose(1, 2)
    assert not mine.is_contiguous()
    close(backward(drawn(B, S, D), lambda x: regions.copy_in(x, group), mine)[1], total)
    for fresh in (False, True):
        close(
            backward(
                mine, lambda x, f=fresh: regions.reduce_out(x, group, fresh=f), drawn(B, S, D)
            )[0],
            total,
        )
    close(
        backward(mine, lambda x: regions.reduce_scatter_sequence(x, group), drawn(B, S // tp, D))[
            0
        ],
        part(total, 1, rank, tp),
    )
    close(
        backward(drawn(B, S // tp, D), lambda x: regions.gather_sequence(x, group), mine)[1],
        part(total, 1, rank, tp),
    )
    expanded = torch.ones((), dtype=torch.float64).expand(B, S, D)
    close(backward(drawn(B, S, D), lambda x: regions.copy_in(x, group), expanded)[1], expanded * tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_sums_of_non_contiguous_tensors_and_gradients_are_not_lost(pool: RankPool, tp: int) -> None:
    pool.run(strided_rank, tp)


def overwriting_rank(rank: int, tp: int) -> None:
    """megatron-core sums in place: neither a kept activation nor a shared gradient may be
    overwritten.
    """
    group = tp_group(rank, tp)
    a = of_rank(rank, B, S, D).requires_grad_()
    regions.reduce_out(torch.tanh(a), group).sum().backward()  # tanh keeps its result for backward
    assert a.grad is not None
    close(a.grad, 1 - torch.tanh(a.detach()) ** 2)

    x, z = drawn(B, S, D).requires_grad_(), drawn(B, S, D, seed=1).requires_grad_()
    # both terms are given one gradient tensor
    (regions.copy_in(x, group) + z).backward(of_rank(rank, B, S, D))
    assert z.grad is not None
    close(z.grad, of_rank(rank, B, S, D))


def test_sums_overwrite_neither_kept_activations_nor_shared_gradients(pool: RankPool) -> None:
    pool.run(overwriting_rank, 2)


REGIONS: list[tuple[Callable[[Tensor, Group], Tensor], int, int]] = [
    (regions.copy_in, S, S),
    (regions.reduce_out, S, S),
    (regions.gather_sequence, S // 4, S),
    (regions.reduce_scatter_sequence, S, S // 4),
]


@pytest.mark.parametrize(("region", "length_in", "length_out"), REGIONS)
def test_meta_tensors_follow_the_shape_rule_in_silence(
    region: Callable[[Tensor, Group], Tensor], length_in: int, length_out: int
) -> None:
    group = lonely_group(1, 4)
    x = torch.empty(B, length_in, D, device="meta", requires_grad=True)
    y = region(x, group)
    assert y.is_meta and y.shape == (B, length_out, D)
    y.sum().backward()
    assert not group.traffic.counts


@pytest.mark.parametrize(("region", "length_in", "length_out"), REGIONS)
def test_one_rank_is_the_identity(
    region: Callable[[Tensor, Group], Tensor], length_in: int, length_out: int
) -> None:
    x = drawn(B, length_in, D)
    assert region(x, lonely_group(0, 1)) is x


@pytest.mark.torture
def test_one_rank_imports_nothing_of_megatron() -> None:
    program = """
import sys
import torch
from torch import nn
from meshwright.mesh.comm import Group
from meshwright.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from meshwright.tensor_parallel.plan import apply
model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))
group = Group("tp", (0,), 0)
apply(model, {"0": "vocab", "1": "vocab"}, [], group, True, {})
ids = torch.zeros(1, 3, dtype=torch.int64)
vocab_parallel_cross_entropy(model(ids), ids, group, 4).sum().backward()
assert not [name for name in sys.modules if name.startswith("megatron")]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.torture
def test_the_door_opens_without_the_warnings_of_missing_extras() -> None:
    program = """
import torch
from meshwright.tensor_parallel import megatron
megatron.load_mappings(torch.device("cpu"))
import warnings
warnings.warn("still heard")
"""
    told = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stderr
    assert "still heard" in told
    assert "Apex" not in told
