"""Rows of units that several tp ranks share: which rank holds which, what is refused,
and what stays as it was.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.adapters.fingerprint import base_sum
from meshwright.checkpoint.boxes import local_boxes
from meshwright.mesh.comm import Group
from meshwright.optimizer.matrix_plan import with_matrices
from meshwright.optimizer.rounded import whole_positions
from meshwright.parameters import ParameterInfo, Slice
from meshwright.tensor_parallel.plan import apply
from meshwright.tensor_parallel.shared_units import SharedColumnLinear, SharedUnits
from meshwright_models.llama import build
from tests.support.errors import raises

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 8,
    "ffn_size": 64,
    "head_dim": 8,
}
QKV, GATE_UP = "block0.attention.qkv.weight", "block1.mlp.gate_up.weight"


def on_rank(
    rank: int, tp: int, num_kv_heads: int, **options: Any
) -> tuple[nn.Sequential, dict[str, ParameterInfo]]:
    """Return the model of a rank, on meta, and its parameters."""
    with torch.device("meta"):
        model: Any = build(**SIZES, num_kv_heads=num_kv_heads, **options)
    group = Group("tp", tuple(range(tp)), rank)
    return model, apply(
        model, model.sharding_plan, [], group, False, model.divisible, model.shared_units
    )


def test_the_rows_of_a_rank() -> None:
    units = SharedUnits((16, 4, 4), 2)  # four query heads of four rows, a key and a value
    assert units.most_sharers == 4
    assert units.slice_of(48, rank=0, tp=4).ranges == ((0, 8), (16, 18), (20, 22))
    assert units.slice_of(48, rank=3, tp=4).ranges == ((32, 40), (42, 44), (46, 48))
    assert units.slice_of(48, rank=3, tp=4).padded == 12
    # of a projection of keys alone: one run
    assert SharedUnits((8,), 1).slice_of(16, rank=3, tp=8) == Slice(0, 6, 8, 2)


@pytest.mark.parametrize(("num_kv_heads", "tp"), [(1, 2), (2, 4), (2, 8), (1, 8), (4, 8)])
@pytest.mark.parametrize("name", [QKV, GATE_UP, QKV.replace("weight", "bias")])
def test_every_row_lies_on_one_rank(num_kv_heads: int, tp: int, name: str) -> None:
    """In the slices, in the boxes of a checkpoint, and in the fingerprint of a base."""
    infos = [on_rank(rank, tp, num_kv_heads, qkv_bias=True)[1][name] for rank in range(tp)]
    shape, several = infos[0].global_shape, infos[0].slice
    assert several is not None and len(several.ranges) > 1
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) % 127
    together, counted, boxed = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    fingerprint = torch.zeros((), dtype=torch.int64)
    for info in infos:
        local = info.take(full)
        assert local.shape == info.local_shape and len(local) == shape[0] // tp
        for here, there in info.ranges_in(local, together):
            there.copy_(here)
        for _, there in info.ranges_in(local, counted):
            there += 1
        for offset, size, tensor in local_boxes(info, local):
            boxed[
                tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))
            ] = tensor.float()
        fingerprint += base_sum([(info, local)])
        positions = whole_positions(info, torch.arange(local.numel()))
        assert torch.equal(full.flatten()[positions], local.flatten())
    assert (
        torch.equal(together.double(), full)
        and torch.equal(boxed.double(), full)
        and bool((counted == 1).all())
    )
    assert torch.equal(fingerprint, base_sum([(ParameterInfo(name, shape), full)]))


def test_a_single_number_has_a_fingerprint() -> None:
    """A learned scale of a frozen base: every kind of value has its own."""
    sums = {
        int(base_sum([(ParameterInfo(name, ()), torch.tensor(value))]))
        for name in "ab"
        for value in (1.0, 2.0)
    }
    assert len(sums) == 4 and 0 not in sums
    both = base_sum(
        [(ParameterInfo("a", ()), torch.tensor(1.0)), (ParameterInfo("v", (3,)), torch.ones(3))]
    )
    assert both == base_sum([(ParameterInfo("a", ()), torch.tensor(1.0))]) + base_sum(
        [(ParameterInfo("v", (3,)), torch.ones(3))]
    )


def test_counts_within_a_unit_are_those_of_a_rank() -> None:
    model, _ = on_rank(0, 8, 2)
    attention, mlp = model.get_submodule("block0.attention"), model.get_submodule("block0.mlp")
    assert (attention.heads_per_group, mlp.block_size) == (1, 8)
    # a query head, a quarter of a key and of a value
    assert model.get_parameter(QKV).shape == (8 + 2 + 2, 16)


@pytest.mark.parametrize(("num_kv_heads", "tp"), [(2, 1), (2, 2), (4, 2), (8, 8)])
def test_ranks_with_whole_units_are_as_before(num_kv_heads: int, tp: int) -> None:
    model, infos = on_rank(tp - 1, tp, num_kv_heads)
    assert not any(isinstance(module, SharedColumnLinear) for module in model.modules())
    assert not any(info.slice is not None and info.slice.several for info in infos.values())
    assert model.get_submodule("block0.attention").heads_per_group == 8 // num_kv_heads


@pytest.mark.parametrize(
    ("options", "tp", "values"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, 2, ("1, 3, 6",)),
        # three query heads in two
        ({"num_heads": 6, "num_kv_heads": 2}, 4, ("1, 2",)),
        # six rows of a key in four
        ({"num_kv_heads": 1, "head_dim": 6}, 4, ("[48, 6, 6]", "1, 2")),
        ({"num_kv_heads": 8}, 16, ("parallel.tp = 16", "1, 2, 4, 8")),
    ],
)
def test_what_cannot_be_shared_is_named(
    options: dict[str, Any], tp: int, values: tuple[object, ...]
) -> None:
    with torch.device("meta"):
        model: Any = build(**{**SIZES, **options})
    divisible = {"block*.attention.qkv": model.divisible["block*.attention.qkv"]}
    with raises("MW-TP-002", *values):
        apply(
            model,
            model.sharding_plan,
            [],
            Group("tp", tuple(range(tp)), 0),
            False,
            divisible,
            model.shared_units,
        )


@pytest.mark.parametrize(
    ("pattern", "entry", "said"),
    [
        ("block*.attention.qkv", ((16, 8, 8), 4), "is no (rows of the parts"),
        ("block*.attention.qkv", ((16, 8, 8),), "is no (rows of the parts"),
        ("block*.attention.qkv", ((16, 0, 8), 1), "is no (rows of the parts"),
        ("block*.attention.qkv", ((20, 8, 8), 2), "no multiple of 8 rows"),
        ("block*.attention.qkv", ((24, 8, 8), 2), "which has 96 rows, no multiple of 40"),
        ("block*.attention.qkv", ((32, 8, 8), 2, "heads"), "whose parent has no number 'heads'"),
        ("block*.attention.out", ((16,), 0), "no nn.Linear of kind column"),
    ],
)
def test_entries_that_do_not_fit(pattern: str, entry: Any, said: str) -> None:
    with torch.device("meta"):
        model: Any = build(**SIZES, num_kv_heads=2)
    with raises("MW-TP-002", said):
        apply(model, model.sharding_plan, [], Group("tp", (0,), 0), False, {}, {pattern: entry})


def test_a_model_without_divisible_is_checked_too() -> None:
    with torch.device("meta"):
        model: Any = build(**SIZES, num_kv_heads=2)
    shared: dict[str, Tensor] = {
        name: each for name, each in model.shared_units.items() if name.endswith("qkv")
    }
    with raises("MW-TP-002", "shared_units['block*.attention.qkv']", "2 units"):
        apply(model, model.sharding_plan, [], Group("tp", (0, 1, 2), 0), False, {}, shared)


def test_matrices_of_other_rows_than_the_parts_of_a_unit() -> None:
    """One rank would hold rows of a matrix at places that no rule gives; the same parts,
    or one matrix, are fine.
    """
    infos = {QKV: on_rank(1, 4, 2)[1][QKV]}
    for rows in ((32, 8, 8), ()):
        assert with_matrices(infos, {QKV: rows}, str)[QKV].matrix == rows
    with raises("MW-OPTIM-008", "(40, 8)", "[16, 4, 4]"):
        with_matrices(infos, {QKV: (40, 8)}, str)
