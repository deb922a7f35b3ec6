"""Recompute by operation: equal bits, fewer bytes; with in-place writes, casts and views,
and over every axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.pipeline.pointwise import PointwiseRecompute, pointwise_recomputed
from meshwright.tensor_parallel import regions
from meshwright.verify import parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.pipeline.kept import MadeBytes
from tests.framework.tensor_parallel.ranks_of_tp import tp_group
from tests.framework.verify.cases import LATER, References, assert_agrees, model_config, size_for
from tests.support.marks import long_row

ROWS, WIDTH = 6, 8


class UserNorm(nn.Module):
    """As Hugging Face writes it: in float32, from a narrower input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )


def gated(layer: nn.Linear, x: Tensor) -> Tensor:
    gate, up = layer(x).chunk(2, dim=-1)
    return layer(torch.cat((F.silu(gate) * up, torch.tanh(up).square()), dim=-1)) + x


def written_before(layer: nn.Linear, x: Tensor) -> Tensor:
    """The sum keeps nothing, so that torch allows the write,
    after which the recipe of ``sum`` is wrong.
    """
    shift = layer(x).detach()
    total = x + shift
    product = layer(total)
    shift.mul_(3)
    return product * shift + F.silu(x)


def written_itself(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)
    a = h * 2
    a.add_(1)
    return layer(a) * h


def in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(F.relu_(layer(F.gelu(layer(x)))))


def squared(layer: nn.Linear, x: Tensor) -> Tensor:
    a = F.silu(layer(x))
    return layer(a * a) + layer(
        a.transpose(0, 1)[:ROWS].transpose(0, 1)[:, :ROWS].sum(-1, keepdim=True) * a
    )


def complex_rotation(layer: nn.Linear, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(layer(x).view(ROWS, WIDTH // 2, 2))
    turned = pairs * torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2).float())
    return (
        layer(torch.view_as_real(turned).reshape(ROWS, WIDTH) * 2)
        + torch.view_as_real(turned * turned).sum()
    )


def other_dtype(layer: nn.Linear, x: Tensor) -> Tensor:
    a = F.silu(layer(x))
    return layer(x * a.detach().view(torch.int32)) + a


def its_own_checkpoint(layer: nn.Linear, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda t: F.silu(layer(t)) * 2, F.silu(layer(x)), use_reentrant=False)
    return out


FUNCTIONS: list[Callable[[Any, Tensor], Tensor]] = [
    gated,
    written_before,
    written_itself,
    in_place,
    squared,
]
FUNCTIONS += [complex_rotation, other_dtype, its_own_checkpoint]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_have_the_same_bits(function: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    found = []
    for run in (function, lambda *args: pointwise_recomputed(function, *args)):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = run(layer, leaf)
        out.backward(torch.ones_like(out))
        found.append([out, leaf.grad, layer.weight.grad])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


def kept(module: nn.Module, x: Tensor) -> tuple[int, Any]:
    with MadeBytes() as made:
        out = module(x)
    return made.bytes() - out.untyped_storage().nbytes(), out


def test_a_norm_of_a_user_keeps_its_narrow_input_and_a_number_per_row() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(UserNorm(), nn.Linear(WIDTH, WIDTH, bias=False))
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    plain, out = kept(block, x)
    block.forward = _wrapped(block.forward)  # type: ignore[method-assign]
    fewer, again = kept(block, x)
    # the wide input, its norm, that times the weight; the root
    assert plain == ROWS * WIDTH * (8 + 4 + 4) + 8 * ROWS
    assert fewer == 8 * ROWS
    assert torch.equal(out, again)


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: pointwise_recomputed(forward, *args)


def test_each_operation_runs_once_more_and_leaves_nothing() -> None:
    """Also where a saved tensor is made from another one, which backward needs later."""
    calls: list[str] = []

    class Counting(PointwiseRecompute):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func._overloadpacket.__name__)
            return super().__torch_dispatch__(func, types, args, kwargs)

    up, down, x = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    with MadeBytes() as made, Counting():
        out = pointwise_recomputed(lambda x: down(F.silu(up(x)[:, :WIDTH]) * up(x)[:, WIDTH:]), x)
        out.sum().backward()
    assert calls.count("silu") == 2 and calls.count("silu_backward") == 1
    gradients = sum(
        p.grad.untyped_storage().nbytes()
        for m in (up, down)
        for p in m.parameters()
        if p.grad is not None
    )
    assert made.bytes() == gradients + out.untyped_storage().nbytes()


def test_a_write_into_what_is_saved_is_found_as_without_recompute() -> None:
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    h = x * 1
    out = pointwise_recomputed(lambda h: F.silu(h).square(), h)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def gathered_rank(rank: int, tp: int) -> list[int]:
    """Return the bytes that a norm's square keeps: alone, and beside an all-gather of the norm."""
    group = tp_group(rank, tp)
    x = torch.randn(2, ROWS, WIDTH).requires_grad_()

    def alone(x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)).square().sum()

    def gathered(x: Tensor) -> Tensor:
        normed = F.layer_norm(x, (WIDTH,))
        return regions.gather_sequence(normed, group).sum() + normed.square().sum()

    found = []
    for function in (alone, gathered):
        with MadeBytes() as made:
            out = pointwise_recomputed(function, x)
            found.append(made.bytes() - out.untyped_storage().nbytes())
        (own,) = torch.autograd.grad(out, x)
        (plain,) = torch.autograd.grad(function(x), x)
        assert torch.equal(own, plain)
    return found


def test_what_an_all_gather_reads_can_be_recomputed(pool: RankPool) -> None:
    """As the norms of sequence parallelism: only the collective's output is written."""
    for alone, gathered in pool.run(gathered_rank, 2):
        assert gathered == alone < 2 * ROWS * WIDTH * 4


def test_a_graph_that_is_dropped_is_freed_at_once() -> None:
    """An operation that saves its own output: kept with its graph, it would be a cycle."""
    weight, x = torch.randn(WIDTH, WIDTH).requires_grad_(), torch.randn(ROWS, WIDTH)
    with MadeBytes() as made:
        out = pointwise_recomputed(lambda: torch.exp(x @ weight))
        assert made.bytes()
        del out
        assert not made.bytes()


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", "pp2,tp2,sequence,zb_h1,pointwise,mbs2"),
        long_row("llama", "dp2,tp2,sequence,zero3,pointwise"),
        LATER("t5", "dp2,pp2,zb_v,zero2,pointwise"),
        LATER("gpt2", "dp2,pp4,interleaved_1f1b,pointwise"),
        LATER("llama", "pp2,tp4,sequence,pointwise"),
    ],
)
def test_layouts_agree(pool: RankPool, references: References, model: str, layout: str) -> None:
    chosen = parse_layout(layout)
    size = size_for(chosen)
    assert_agrees(
        model_config(model, size), chosen, pool, references, global_batch=size.global_batch, steps=2
    )
