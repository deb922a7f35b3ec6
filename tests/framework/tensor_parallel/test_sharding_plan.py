"""A plan applied to a whole transformer gives the numbers of the plain model;
a plan that does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.parameters import ParameterInfo, Slice
from meshwright.seeding import SeededDropout, seed_dropouts
from meshwright.tensor_parallel.check import check_sequence_length
from meshwright.tensor_parallel.layers import RowLinear, VocabEmbedding, VocabHead
from meshwright.tensor_parallel.plan import apply
from meshwright.tensor_parallel.whole_layers import ColumnEmbedding
from tests.framework.tensor_parallel.ranks_of_tp import lonely_group
from tests.framework.tensor_parallel.tiny_transformer import (
    DIM,
    DIVISIBLE,
    LENGTH,
    PLAN,
    TIED,
    build,
)
from tests.support.errors import raises

B = 3


def infos_of(rank: int, tp: int, sequence: bool) -> tuple[nn.Sequential, dict[str, ParameterInfo]]:
    with torch.device("meta"):
        model = build()
    seed_dropouts(model, 0)
    return model, apply(model, PLAN, TIED, lonely_group(rank, tp), sequence, DIVISIBLE)


@pytest.mark.parametrize("sequence", [False, True])
def test_every_parameter_is_told_where_it_is_and_what_its_gradient_lacks(sequence: bool) -> None:
    model, infos = infos_of(1, 2, sequence)
    assert infos["embedding.tokens.weight"].slice == Slice(0, 5, 9, 5)
    assert infos["head.weight"].slice == Slice(0, 5, 9, 5)
    assert infos["block1.attention.q.bias"].slice == Slice(0, 8, 16, 8)
    assert infos["block1.attention.out.weight"].slice == Slice(1, 8, 16, 8)
    assert infos["block1.attention.out.bias"].slice is None
    for name, info in infos.items():
        assert model.get_parameter(name).shape == info.local_shape
        assert model.get_parameter(name).is_meta
    partial = {name for name, info in infos.items() if info.is_partial}
    if sequence:
        assert partial == {name for name, info in infos.items() if info.slice is None}
    else:
        assert partial == {
            f"block{i}.attention.q_norm.{name}" for i in range(2) for name in ("weight", "bias")
        }
    assert isinstance(model.head, VocabHead) and isinstance(model.embedding.tokens, VocabEmbedding)
    assert model.head.weight is model.embedding.tokens.weight


def test_dropouts_learn_which_part_of_an_activation_they_see() -> None:
    def shards(sequence: bool) -> dict[str, tuple[int, int, int] | None]:
        model, _ = infos_of(1, 2, sequence)
        return {
            name: module.shard
            for name, module in model.named_modules()
            if isinstance(module, SeededDropout)
        }

    mine = (1, 1, 2)
    heads = {"block0.attention.drop_scores": mine, "block1.attention.drop_scores": mine}
    others = ["embedding.drop", "block0.drop", "block1.drop"]
    assert shards(False) == heads | dict.fromkeys(others, None)
    assert shards(True) == heads | dict.fromkeys(others, mine)


def test_a_dropout_before_the_cut_of_a_sequence_module_sees_all_positions() -> None:
    inner = nn.Sequential(nn.Embedding(LENGTH, DIM), nn.Dropout(0.1))
    model = nn.Sequential(nn.Embedding(4, DIM), inner, nn.Linear(DIM, 4))
    seed_dropouts(model, 0)
    model.eval()
    apply(model, {"0": "vocab", "1": "sequence", "2": "vocab"}, [], lonely_group(1, 2), True, {})
    assert model[1][1].shard is None
    assert inner(torch.arange(LENGTH)).shape == (LENGTH // 2, DIM)


def test_a_dropout_between_column_and_row_sees_its_part_of_the_features() -> None:
    model = nn.Sequential(nn.Linear(DIM, 8), nn.Dropout(0.5), nn.Linear(8, DIM))
    draw = seed_dropouts(model, 0)
    draw.sample_indices = torch.arange(2)
    whole = model[1].mask(torch.Size([2, 3, 8]), torch.device("cpu"))
    apply(model, {"0": "column", "1": "features", "2": "row"}, [], lonely_group(1, 2), False, {})
    assert torch.equal(model[1].mask(torch.Size([2, 3, 4]), torch.device("cpu")), whole[..., 4:])
    with raises("MW-TP-002", "has parameters"):
        apply(nn.Sequential(nn.Linear(4, 4)), {"0": "features"}, [], lonely_group(0, 2), False, {})


def test_an_embedding_may_be_one_weight_with_another_that_is_split_alike() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Embedding(5, 8), nn.Linear(8, 5, bias=False))
    model[1].weight = model[0].weight
    tied = [("0.weight", "1.weight")]
    infos = apply(model, {"0": "column", "1": "column"}, tied, lonely_group(1, 2), False, {})
    assert infos["0.weight"] == ParameterInfo("0.weight", (5, 8), Slice(1, 4, 8, 4))
    assert isinstance(model[0], ColumnEmbedding) and model[1].weight is model[0].weight


def test_one_rank_swaps_nothing_but_still_reads_the_plan() -> None:
    model, infos = infos_of(0, 1, True)
    assert {type(module) for module in model.modules()}.isdisjoint(
        {VocabHead, VocabEmbedding, RowLinear}
    )
    assert all(
        info == ParameterInfo(name, model.get_parameter(name).shape) for name, info in infos.items()
    )
    with raises("MW-TP-002", "no kind"):
        apply(build(), {"head": "vocabulary"}, [], lonely_group(0, 1), False, {})


def test_a_module_used_twice_is_split_once() -> None:
    shared = nn.Linear(DIM, DIM)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    apply(model, {"*.0": "row"}, [], lonely_group(0, 2), False, {})
    assert isinstance(model[0][0], RowLinear) and model[0][0] is model[1][0]


Case = tuple[
    Callable[[], nn.Sequential],
    dict[str, str],
    list[tuple[str, ...]],
    int,
    bool,
    dict[str, int],
    list[str],
]


def linear_head() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6), nn.LayerNorm(6))


MISFITS: dict[str, Case] = {
    "unknown kind": (build, {"head": "colum"}, [], 2, False, {}, ["'colum' is no kind (did you mean 'column'?)"]),
    "two kinds": (
        build, PLAN | {"block0.*": "replicate"}, TIED, 2, False, {},
        ["block0.up is column by sharding_plan['block*.up'] and replicate by sharding_plan['block0.*']"],
    ),
    "kind on the wrong type": (
        linear_head, {"0": "row", "2": "vocab"}, [], 2, False, {},
        ["0 (row by sharding_plan['0']) is of type Embedding", "2 (vocab", "LayerNorm", "nn.Embedding or nn.Linear"],
    ),
    "rows": (
        build, PLAN, TIED, 5, False, {},
        ["block0.up (column by sharding_plan['block*.up'])", "24 x 16", "24 rows", "parallel.tp = 5", "(and 1 more"],
    ),
    "columns": (build, PLAN, TIED, 5, False, {}, ["block0.down", "16 x 24", "24 columns"]),
    "units": (
        build, PLAN, TIED, 8, False, {"block*.attention.k": 2},
        ["block0.attention.k (divisible['block*.attention.k']) has 2 units", "tp = 8", "use a tp of 1, 2"],
    ),
    "nothing to split": (build, {}, TIED, 2, False, {}, ["splits nothing", "use parallel.tp = 1"]),
    "features": (
        lambda: nn.Sequential(nn.Embedding(6, 4)), {"0": "column"}, [], 3, False, {},
        ["0 (column by sharding_plan['0']) has a table of 6 x 4", "4 features", "parallel.tp = 3"],
    ),
    "no way into the sequence": (linear_head, {"1": "vocab"}, [], 2, True, {}, ["no module of the sharding_plan cuts"]),
    "no way out of the sequence": (linear_head, {"0": "vocab"}, [], 2, True, {}, ["puts the sequence together"]),
    "embedding with a norm": (
        lambda: nn.Sequential(nn.Embedding(6, 4, max_norm=1.0)), {"0": "vocab"}, [], 2, False, {}, ["max_norm"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_plan_that_does_not_fit_is_refused_before_anyone_speaks(case: str) -> None:
    builder, plan, tied, tp, sequence, divisible, words = MISFITS[case]
    model = builder()
    before = {name: id(module) for name, module in model.named_modules()}
    with raises("MW-TP-002") as caught:
        apply(model, plan, tied, lonely_group(0, tp), sequence, divisible)
    for word in words:
        assert word in str(caught.value)
    assert before == {name: id(module) for name, module in model.named_modules()}


@pytest.mark.parametrize(
    ("attribute", "pattern", "near"),
    [
        ("sharding_plan", "blok*.up", "block0.up"),
        ("divisible", "*.atention.k", "block0.attention.k"),
        ("shared_units", "block*.attention.qvk", "block0.attention.q"),
    ],
)
def test_a_pattern_without_a_module_is_refused_on_every_layout(
    attribute: str, pattern: str, near: str
) -> None:
    given: dict[str, Any] = {"sharding_plan": PLAN, "divisible": {}, "shared_units": {}}
    given[attribute] = {**given[attribute], pattern: "column"}
    plan, divisible, shared = given.values()
    with raises("MW-PLACEMENT-001", attribute, repr(pattern), near):
        apply(build(), plan, TIED, lonely_group(0, 1), False, divisible, shared)


def test_a_tied_weight_is_split_alike_at_all_places() -> None:
    plan = {name: kind for name, kind in PLAN.items() if name != "head"}
    values = ("embedding.tokens.weight is vocab (0:5 of dim 0)", "head.weight is replicate (whole)")
    with raises("MW-PLACEMENT-002", *values):
        apply(build(), plan, TIED, lonely_group(0, 2), False, {})
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
    with raises("MW-PLACEMENT-002", "0.weight is column", "1.weight is column"):
        apply(model, {"*": "column"}, [("0.weight", "1.weight")], lonely_group(0, 2), False, {})


def test_all_problems_of_a_plan_are_told_at_once() -> None:
    with raises("MW-PLACEMENT-001") as caught:
        apply(
            build(),
            {"nowhere": "row", "head": "diagonal", "norm": "column"},
            [],
            lonely_group(0, 2),
            False,
            {},
        )
    assert len(str(caught.value).splitlines()) == 3


def test_a_sequence_that_tp_does_not_divide_is_refused() -> None:
    check_sequence_length(1024, 8)
    with raises("MW-TP-001", "sequence_length = 255", "254 or 256"):
        check_sequence_length(255, 2)
    with raises("MW-TP-001", 8):
        check_sequence_length(3, 8)
    with raises("MW-TP-001", "inputs['decoder_ids'], 9", "8 or 10"):
        check_sequence_length(9, 2, "inputs['decoder_ids']")
