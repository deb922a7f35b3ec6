"""Emulated float8 on layouts: the numbers of one plain process, and operands that are bit-equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright.fp8.linear
import meshwright.fp8.quantise
import meshwright.tensor_parallel.fp8_layers
from meshwright.config import RunConfig
from meshwright.fp8.linear import Fp8Linear
from meshwright.fp8.quantise import Float8Tensor
from meshwright.mesh.comm import Group
from meshwright.tensor_parallel.layers import ColumnLinear, RowLinear
from meshwright.verify import compare, layout_config, parse_layout
from meshwright.verify.rank import merge
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.tensor_parallel.ranks_of_tp import close, drawn, fill, part, tp_group
from tests.framework.verify.cases import LATER, References, assert_agrees, model_config, size_for
from tests.support.marks import long_row
from tests.support.run import run_broken

FP8 = {"linear": "fp8", "fp8_keep": ["head"]}
"""The models of this file have two blocks, which the default would keep."""


def config_for(model: str, layout: str, **train: Any) -> tuple[RunConfig, int]:
    size = size_for(parse_layout(layout))
    return model_config(model, size).replace(train=FP8 | train), size.global_batch


@pytest.mark.parametrize(
    ("layout", "dtype", "num_kv_heads"),
    [
        ("tp2,sequence", "float64", 1),
        LATER("tp4", "bfloat16", 2),
        LATER("dp2,tp2,zero2", "float64", 1),
    ],
)
def test_more_tp_ranks_than_key_value_heads(
    layout: str, dtype: str, num_kv_heads: int, pool: RankPool, references: References
) -> None:
    chosen = parse_layout(layout)
    size = size_for(chosen)
    config = model_config("llama", size, num_kv_heads=num_kv_heads).replace(train=FP8)
    assert_agrees(
        config, chosen, pool, references, global_batch=size.global_batch, steps=2, dtype=dtype
    )


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ("gpt2", "pp2,tp2,zb_h1,sequence", "float64"),
        long_row("llama", "dp2,zero3,full,mbs2", "float64"),
        long_row("gpt2", "tp2,sequence,selective", "bfloat16"),
        LATER("llama", "dp2,pp2,tp2", "float64"),
        LATER("t5", "dp2,tp2", "float64"),
        LATER("llama", "tp4,sequence", "float32"),
        LATER("gpt2", "dp4,zero2,mbs2", "bfloat16"),
        LATER("llama", "pp2,zb_v,tp2,full", "float64"),
    ],
)
def test_numbers_of_one_plain_process(
    model: str, layout: str, dtype: str, pool: RankPool, references: References
) -> None:
    config, global_batch = config_for(model, layout)
    chosen = parse_layout(layout)
    assert_agrees(config, chosen, pool, references, global_batch=global_batch, steps=2, dtype=dtype)


@pytest.mark.parametrize("layout", ["cp2", "cp2,tp2,sequence"])
def test_beside_context_parallelism(layout: str, pool: RankPool, references: References) -> None:
    """With samples long enough for the search for layers that mix tokens."""
    chosen = parse_layout(layout)
    size = size_for(chosen)._replace(sequence_length=32)
    config = model_config("llama", size).replace(train=FP8)
    assert_agrees(config, chosen, pool, references, global_batch=size.global_batch, steps=2)


def identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(meshwright.fp8.quantise, "to_codes", lambda scaled: scaled)


def scales_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """Each tp rank scales by the part of a row that it holds."""
    patch.setattr(meshwright.fp8.quantise, "agree", lambda exponents, group: exponents)


@pytest.mark.parametrize("layout", ["pp2,tp2,zb_h1,sequence", LATER("dp2,tp2")])
def test_without_rounding_it_is_the_model_without_fp8(
    layout: str, pool: RankPool, references: References
) -> None:
    """Everything but the rounding to 8 bits, within the bars of a model that has none."""
    config, global_batch = config_for("llama", layout)
    plain = config.replace(train={"linear": "dtype", "fp8_keep": None})
    expected = references.expected(plain, global_batch, 2, "float64").findings
    chosen = parse_layout(layout)
    text = layout_config(config, chosen, global_batch, "float64").model_dump_json()
    found = merge(pool.run(run_broken, chosen.size, identity, text, 2))
    row = compare(layout, found, None, expected, TOLERANCES["float64"])
    assert row.passed, "\n".join(row.problems)


def test_scales_that_tp_ranks_do_not_agree_on_are_found(
    pool: RankPool, references: References
) -> None:
    config, global_batch = config_for("llama", "tp2")
    expected = references.expected(config, global_batch, 2, "float64").findings
    text = layout_config(config, parse_layout("tp2"), global_batch, "float64").model_dump_json()
    found = merge(pool.run(run_broken, 2, scales_of_its_own, text, 2))
    row = compare("tp2", found, None, expected, TOLERANCES["float64"])
    assert not row.passed and any("gradients" in problem for problem in row.problems)


# ------------------------------------------------------------------------------------------------
# operands, bit for bit

B, S, I, O = 2, 8, 32, 48  # noqa: E741


def operands(module: nn.Module, x: Tensor, gradient: Tensor) -> list[Float8Tensor]:
    """Run forward and backward; return what was quantised: x, W, dy, W^T."""
    found: list[Float8Tensor] = []
    quantise = meshwright.fp8.linear.quantise

    def recorded(tensors: list[Tensor], group: Group | None) -> list[Float8Tensor]:
        found.extend(quantise(tensors, group))
        return found[-len(tensors) :]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshwright.fp8.linear, "quantise", recorded)
        patch.setattr(meshwright.tensor_parallel.fp8_layers, "quantise", recorded)
        module(x.detach().clone().requires_grad_()).backward(gradient)
    assert len(found) == 4
    return found


def bit_equal(found: Float8Tensor, whole: Float8Tensor) -> None:
    for mine, theirs in zip(found, whole, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def cut(whole: Float8Tensor, dim: int, rank: int, tp: int) -> Float8Tensor:
    """Return the part of a tensor that is quantised in one piece;
    the scale of a row is that of all its parts.
    """
    along_rows = dim in (-1, whole.codes.dim() - 1)
    exponents = whole.exponents if along_rows else part(whole.exponents, dim, rank, tp)
    return Float8Tensor(part(whole.codes, dim, rank, tp), exponents)


def operands_rank(rank: int, tp: int, dtype: torch.dtype, sequence: bool) -> None:
    group = tp_group(rank, tp)
    x, gradient = drawn(B, S, I, dtype=dtype), drawn(B, S, O, seed=1, dtype=dtype)
    x, gradient = (
        x * torch.linspace(0.1, 9, I).to(dtype),
        gradient * torch.linspace(9, 0.1, O).to(dtype),
    )
    plain = fill(nn.Linear(I, O, bias=False, dtype=dtype))
    plain.__class__ = Fp8Linear
    whole_x, whole_w, whole_dy, whole_wt = operands(plain, x, gradient)

    def along_sequence(whole: Tensor) -> Tensor:
        return part(whole, 1, rank, tp) if sequence else whole

    found = operands(
        ColumnLinear(plain, group, sequence), along_sequence(x), part(gradient, 2, rank, tp)
    )
    expected_x = found[0].codes.shape[1] != S
    bit_equal(found[0], cut(whole_x, 1, rank, tp) if expected_x else whole_x)
    bit_equal(found[1], cut(whole_w, 0, rank, tp))
    bit_equal(found[2], cut(whole_dy, 2, rank, tp))
    bit_equal(found[3], cut(whole_wt, 1, rank, tp))
    found = operands(
        RowLinear(plain, group, sequence), part(x, 2, rank, tp), along_sequence(gradient)
    )
    bit_equal(found[0], cut(whole_x, 2, rank, tp))
    bit_equal(found[1], cut(whole_w, 1, rank, tp))
    bit_equal(found[2], whole_dy)
    bit_equal(found[3], cut(whole_wt, 0, rank, tp))
    linear_gradients(plain, group, sequence, x, gradient)


def linear_gradients(
    plain: nn.Linear, group: Any, sequence: bool, x: Tensor, gradient: Tensor
) -> None:
    """Outputs and gradients of a column are the parts of the plain linear's,
    up to the sum over tp.
    """
    if x.dtype != torch.float64:
        return
    rank, tp = group.rank, group.size
    plain.zero_grad()
    whole = x.clone().requires_grad_()
    y = plain(whole)
    y.backward(gradient)
    column = ColumnLinear(plain, group, sequence)
    mine = (part(x, 1, rank, tp) if sequence else x).clone().requires_grad_()
    y_split = column(mine)
    y_split.backward(part(gradient, 2, rank, tp))
    assert whole.grad is not None and mine.grad is not None and plain.weight.grad is not None
    close(y_split.detach(), part(y.detach(), 2, rank, tp))
    close(mine.grad, part(whole.grad, 1, rank, tp) if sequence else whole.grad)
    assert column.weight.grad is not None
    close(column.weight.grad, part(plain.weight.grad, 0, rank, tp))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sequence", [False, True])
def test_operands_are_bit_equal(dtype: torch.dtype, sequence: bool, pool: RankPool) -> None:
    pool.run(operands_rank, 4, dtype, sequence)


# --------------------------------------------------------------------------------------------------------
# on the wire


def wire_rank(rank: int, tp: int) -> None:
    """A column under sequence parallelism gathers bytes and exponents, twice;
    partial input gradients stay as wide.
    """
    group = tp_group(rank, tp)
    plain = fill(nn.Linear(I, O, bias=False, dtype=torch.bfloat16))
    plain.__class__ = Fp8Linear
    column = ColumnLinear(plain, group, True)
    x = drawn(B, S // tp, I, dtype=torch.bfloat16).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        y = column(x)
    y.backward(torch.ones_like(y))
    share = (tp - 1) / tp
    wire = {name: count.wire_bytes for (_, name), count in group.traffic.counts.items()}
    assert wire == {
        "all_gather": 2 * B * S * (I + 1) * share,
        "all_reduce": 2 * (B * S + I) * share,
        "reduce_scatter": 2 * B * S * I * share,
    }
    assert sum(tensor.numel() * tensor.itemsize for tensor in kept) == B * S // tp * (I + 1)


def test_half_the_bytes_of_a_gathered_sequence(pool: RankPool) -> None:
    pool.run(wire_rank, 2)
