"""Any layout gives the numbers of one process: a pairwise selection of all of them, and,
when asked, all of them.

``pytest -m all_layouts`` runs every combination.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from meshwright.verify import parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    DECODERS,
    LATER,
    MODELS,
    Case,
    References,
    assert_agrees,
    by_reference,
    every_layout,
    every_other_schedule,
    model_config,
    other_choices,
    pairs,
    pairwise,
    sharded_choices,
    size_for,
    suits,
)
from tests.support.marks import mark_all_rows_but, marked_rows

FLOAT64 = [
    Case(model, layout) for layout in every_layout() for model in MODELS if suits(model, layout)
]
OTHER_SCHEDULES = [
    Case(model, layout)
    for layout in every_other_schedule()
    for model in MODELS
    if suits(model, layout)
]
SHARDED = [
    Case(model, layout)
    for layout in sharded_choices(("1f1b", "interleaved_1f1b", "zb_h1", "zb_v"))
    for model in DECODERS
]
SHARDED_LATER = [
    Case(model, layout)
    for layout in sharded_choices(("gpipe", "zb_h2", "v_half", "v_min"))
    for model in DECODERS
]
CHOICES = [Case(model, layout) for layout in other_choices() for model in DECODERS]
USUAL_DEGREES = {1, 2, 4, 8}
"""Of others ODD has one each: the rest is left to ``make verify-all``."""
OF_DECODERS = [
    case
    for case in FLOAT64
    if case.model in DECODERS and {case.layout.dp, case.layout.pp, case.layout.tp} <= USUAL_DEGREES
]
SELECTION = pairwise(OF_DECODERS)
ODD = [
    Case("gpt2", parse_layout("dp3,pp2,zero0")),
    Case("llama", parse_layout("pp3,tp2,sequence")),
    Case("llama", parse_layout("dp2,tp3,gpipe,mbs2")),
]
OTHER_SELECTION = pairwise(CHOICES)
FIRST_OF_SCHEDULES = {case.layout.schedule: case for case in reversed(OTHER_SELECTION)}.values()
"""The others are of `make long`."""
SHARDED_SELECTION = pairwise(SHARDED)
FLOAT32 = [
    Case(model, parse_layout(text), "float32")
    for model, text in (
        ("gpt2", "dp2,pp2"),
        ("gpt2", "dp2,tp2,zero0,mbs2"),
        ("llama", "pp2,tp2,sequence"),
        ("llama", "tp3,gpipe"),
    )
]


def check(
    case: Case, steps: int, pool: RankPool, references: References, twice: bool = True
) -> None:
    size = size_for(case.layout)
    config = model_config(case.model, size)
    assert_agrees(
        config,
        case.layout,
        pool,
        references,
        global_batch=size.global_batch,
        steps=steps,
        dtype=case.dtype,
        twice=twice,
    )


@mark_all_rows_but(
    "all_layouts",
    "gpt2-dp2,pp1,tp1,1f1b,zero0,mbs1-float64",
    "gpt2-dp1,pp4,tp1,gpipe,zero1,mbs2-float64",
)
@pytest.mark.parametrize("case", [*SELECTION, *ODD], ids=str)
def test_the_layout_gives_the_numbers_of_one_process(
    case: Case, pool: RankPool, references: References
) -> None:
    check(case, 2, pool, references, twice=False)  # that a layout repeats is seen in float32, below


@marked_rows(
    "long",
    "llama-dp1,pp2,tp2,zb_h1,zero1,sequence,selective,mbs1-float64",
    "llama-dp2,pp4,tp1,zb_h2,zero1,full,mbs1-float64",
    "gpt2-dp2,pp2,tp2,zb_v,zero1,sequence,full,mbs1-float64",
    "gpt2-dp1,pp4,tp1,v_half,zero1,selective,mbs1-float64",
    "llama-dp1,pp1,tp2,v_min,zero1,sequence,mbs1-float64",
)
@pytest.mark.parametrize(
    "case",
    [
        case if case in FIRST_OF_SCHEDULES else pytest.param(case, marks=pytest.mark.long)
        for case in OTHER_SELECTION
    ],
    ids=str,
)
def test_the_other_schedules_do_with_recomputation_too(
    case: Case, pool: RankPool, references: References
) -> None:
    check(case, 2, pool, references, twice=False)


@marked_rows(
    "long",
    "llama-dp4,pp1,tp2,interleaved_1f1b,zero2,sequence,full,shard1,step,offload,mbs1-float64",
    "llama-dp4,pp2,tp1,zb_h1,zero3,shard2,offload,mbs1-float64",
    "gpt2-dp2,pp2,tp2,zb_v,zero3,sequence,full,step,mbs1-float64",
    "gpt2-dp4,pp1,tp2,zb_h1,zero1,sequence,full,shard2,mbs1-float64",
    "gpt2-dp4,pp2,tp1,interleaved_1f1b,zero2,shard1,mbs1-float64",
    "llama-dp4,pp1,tp2,1f1b,zero2,full,shard2,step,mbs1-float64",
    "gpt2-dp4,pp1,tp2,1f1b,zero3,sequence,shard1,offload,mbs1-float64",
    "llama-dp4,pp2,tp1,zb_v,zero1,full,shard1,offload,mbs1-float64",
    "gpt2-dp4,pp1,tp1,interleaved_1f1b,zero3,mbs1-float64",
    "gpt2-dp2,pp2,tp1,1f1b,zero1,mbs1-float64",
    "gpt2-dp4,pp1,tp1,interleaved_1f1b,zero1,shard2,mbs1-float64",
    "gpt2-dp4,pp1,tp1,zb_h1,zero1,shard1,mbs1-float64",
    "gpt2-dp4,pp1,tp1,zb_v,zero1,shard2,mbs1-float64",
)
@pytest.mark.parametrize(
    "case", [*SHARDED_SELECTION, *map(LATER, pairwise(SHARDED_LATER))], ids=str
)
def test_whatever_is_sharded_over_the_replicas(
    case: Case, pool: RankPool, references: References
) -> None:
    check(case, 2, pool, references, twice=False)


@marked_rows(
    "all_layouts",
    "gpt2-dp2,pp1,tp2,1f1b,zero0,mbs2-float32",
    "llama-dp1,pp2,tp2,1f1b,zero1,sequence,mbs1-float32",
    "llama-dp1,pp1,tp3,gpipe,zero1,mbs1-float32",
)
@marked_rows("long", "gpt2-dp2,pp2,tp1,1f1b,zero1,mbs1-float32")
@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_the_layout_gives_them_in_float32(
    case: Case, pool: RankPool, references: References
) -> None:
    check(case, 2, pool, references)


@mark_all_rows_but("all_layouts", "own0-dp2,pp2,zero2")
@pytest.mark.parametrize("layout", ["dp2,pp2,zero2", "dp2,tp2,zero3", "dp4,shard2,offload"])
@pytest.mark.parametrize(
    "own", [{"name": "sgd", "learning_rate": 0.1}, {"name": "adamw8bit", "block_size": 8}]
)
def test_other_optimizers_give_them_too(
    own: dict[str, Any], layout: str, pool: RankPool, references: References
) -> None:
    size = size_for(parse_layout(layout))
    config = model_config("gpt2", size)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=own)})
    assert_agrees(config, layout, pool, references, global_batch=size.global_batch, steps=3)


@pytest.mark.parametrize(
    "case",
    by_reference(
        [case._replace(dtype=dtype) for dtype in ("float64", "float32") for case in FLOAT64],
        steps=2,
    ),
    ids=str,
)
def test_every_layout_gives_the_numbers_of_one_process(
    case: Case, pool: RankPool, references: References
) -> None:
    check(case, 2, pool, references, twice=False)


@pytest.mark.parametrize("case", by_reference(OTHER_SCHEDULES, steps=2), ids=str)
def test_every_other_schedule_gives_the_numbers_of_one_process(
    case: Case, pool: RankPool, references: References
) -> None:
    check(case, 2, pool, references, twice=False)


@pytest.mark.parametrize(
    "case", by_reference([*SELECTION, *OTHER_SELECTION, *FLOAT32], steps=10), ids=str
)
def test_the_numbers_stay_so_over_ten_steps(
    case: Case, pool: RankPool, references: References
) -> None:
    check(case, 10, pool, references)


def test_the_selection_misses_no_pair() -> None:
    """Counted anew, without the generator's own bookkeeping."""
    for selection, cases in (
        (SELECTION, OF_DECODERS),
        (OTHER_SELECTION, CHOICES),
        (SHARDED_SELECTION, SHARDED),
    ):
        seen = set().union(*(pairs(case) for case in selection))
        for case in cases:
            chosen = {"model": case.model, **case.layout._asdict()}
            for two in itertools.combinations(sorted(chosen.items()), 2):
                if case.layout.dp > 1 or "zero" not in dict(two):
                    assert two in seen, two
        assert len(selection) < len(cases) / 10
