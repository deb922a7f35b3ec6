"""Routing as data in verify: one file from every layout, replay on any,
and other routing told from other numbers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import RunConfig
from meshwright.expert_parallel.routing import RoutingPlan
from meshwright.verify import Verification, compare, layout_config, parse_layout, run_layout
from meshwright.verify.rank import merge
from meshwright.verify.reference import run_reference
from meshwright.verify.routes import Routes
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, config_of
from tests.support.errors import raises
from tests.support.marks import long_row, marked_rows

LENGTH, STEPS = 16, 2
REPLAY = ("replay", None)
MOE: dict[str, Any] = {"num_experts": 6, "top_k": 2, "count_tokens": True}
CAPACITY = MOE | {"capacity_factor": 0.75}


def model(moe: dict[str, Any], fault: str = "") -> RunConfig:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_layers": 2,
        "max_sequence_length": LENGTH,
        "dropout": 0.1,
    }
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "ffn_size": 12, "moe": moe, "fault": fault}  # type: ignore[dict-item]
    if fault == "own":
        del sizes["fault"]
    return config_of(
        f"tests.framework.verify.routing_model:build{'_own' if fault == 'own' else ''}",
        sizes,
        LENGTH,
    )


@functools.cache
def proof(moe: str, fault: str, mode: str | None) -> Verification:
    config = model({"capacity": CAPACITY, "one": CAPACITY | {"top_k": 1}}.get(moe, MOE), fault)
    return Verification(
        config, global_batch=8, steps=STEPS, random_tokens=True, routing=(mode, None)
    )


LAYOUTS = [
    ("capacity", "cp2,tp2,ep2,sequence,full", True),
    ("capacity", "dp2,pp2,ep2,mbs2,zb_h1", True),
    ("capacity", "tp2,ep2,sequence", False),
    ("capacity", "dp4,ep2,zero2", False),
    ("capacity", "cp2,ep2,mbs2", False),
    ("capacity", "dp2,cp2,ep2,contiguous,zero3", False),
    ("capacity", "pp2,tp2,interleaved_1f1b", False),
    ("all", "cp2,dp2,ep2,contiguous,mbs2", False),
    ("all", "dp2,tp2,ep2,sequence,zero3", False),
    ("all", "pp2,tp2,zb_v", False),
    ("one", "dp2,ep2", False),
    ("own", "cp2,tp2,ep2,sequence", False),
]


@marked_rows("all_layouts", "capacity-cp2,tp2,ep2,sequence,full")
@marked_rows("long", "capacity-dp2,pp2,ep2,mbs2,zb_h1")
@pytest.mark.parametrize(
    ("moe", "text"), [(pytest.param if first else LATER)(*case) for *case, first in LAYOUTS]
)
def test_every_layout_drops_the_same_tokens_and_writes_the_same_file(
    moe: str, text: str, pool: RankPool, tmp_path: Path
) -> None:
    verification, layout = proof(moe, "own" if moe == "own" else "", "record"), parse_layout(text)
    expected, routes = verification._reference(1).findings, verification.routes
    assert isinstance(routes, Routes)
    config = layout_config(verification.config, layout, 8, "float64")
    plan = routes.of_reference(1)._replace(record=tmp_path)
    found = merge(pool.run(run_layout, layout.size, config.model_dump_json(), STEPS, True, plan))
    assert compare(text, found, None, expected, TOLERANCES["float64"]).problems == []
    theirs = routes._of_plain(1)
    names = sorted(file.name for file in theirs.iterdir())
    assert names == sorted(file.name for file in tmp_path.iterdir()) and len(names) == 2 * STEPS
    for name in names:
        assert (tmp_path / name).read_bytes() == (theirs / name).read_bytes(), name
    if moe == "capacity":
        name = "of sums block1.mlp.router.dropped"
        assert found.metrics[0][name] == expected.metrics[0][name] > 0, (
            "integers are summed exactly"
        )


@pytest.mark.parametrize(
    "text", [long_row("dp2,ep2"), LATER("cp2,tp2,ep2,sequence"), LATER("pp2,zb_v,full,mbs2")]
)
def test_replay_takes_the_plain_runs_choices_and_leaves_other_numbers(
    text: str, pool: RankPool
) -> None:
    layout = parse_layout(text)
    alone = proof("capacity", "choice", None).compare_layout(layout, pool, is_repeated=False)
    assert any("loss of step 1" in problem for problem in alone.problems), alone.failure
    recorded = proof("capacity", "choice", "record").compare_layout(layout, pool, is_repeated=False)
    (said,) = [
        problem
        for problem in recorded.problems
        if "tokens have other experts than in the plain run" in problem
    ]
    assert (
        "first in step 1: " in said
        and "in block0.mlp.router, the first of them position 0 of sample 0" in said
    )
    replayed = proof("capacity", "choice", "replay").compare_layout(layout, pool, is_repeated=False)
    assert replayed.passed, (replayed.problems, replayed.failure)


@pytest.mark.long
def test_replay_hides_no_other_numbers(pool: RankPool) -> None:
    row = proof("all", "numbers", "replay").compare_layout(
        parse_layout("dp2,ep2"), pool, is_repeated=False
    )
    assert any("loss of step 1" in problem for problem in row.problems), row.failure


def test_weights_of_replayed_ids_are_the_routers_own_and_have_a_gradient(tmp_path: Path) -> None:
    other = proof("all", "", None)
    free = run_reference(other.plain, other.source, 1, torch.float64)
    plan = RoutingPlan(record=tmp_path)
    again = run_reference(other.plain, other.source, 1, torch.float64, routing=plan)
    assert free.losses == again.losses and free.grad_norms == again.grad_norms
    replay = run_reference(
        other.plain, other.source, 1, torch.float64, routing=RoutingPlan(replay=tmp_path)
    )
    assert replay.losses == free.losses and replay.grad_norms == free.grad_norms


@pytest.mark.all_layouts
def test_precisions_whose_rounding_is_measured(pool: RankPool) -> None:
    """By a run of one step, whose validation has no recording."""
    of_16_bits = Verification(
        model(MOE), global_batch=8, steps=2, dtype="bfloat16", random_tokens=True, routing=REPLAY
    )
    row = of_16_bits.compare_layout(parse_layout("dp2,ep2"), pool, is_repeated=False)
    assert row.passed, (row.problems, row.failure)


def test_a_model_without_such_routers_is_refused() -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_layers": 2,
        "max_sequence_length": LENGTH,
        "num_heads": 4,
    }
    config = config_of(
        "meshwright_models.llama:build", sizes | {"num_kv_heads": 2, "ffn_size": 12}, LENGTH
    )
    with raises("MW-EP-008"):
        Verification(config, global_batch=8, steps=1, random_tokens=True, routing=("record", None))
