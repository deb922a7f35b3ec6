"""Metrics that a model records are those of one process, over every axis,
recompute and split backward.
"""

from __future__ import annotations

import pytest

from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import RankFindings, run_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of, prove
from tests.support.errors import raises
from tests.support.marks import all_layouts_row, mark_all_rows_but

LAYOUTS = ["dp2,pp2,tp2,zero2", "dp2,tp2,zero3,full", "pp2,tp2,zb_v", "pp2,interleaved_1f1b,mbs2"]


@mark_all_rows_but("all_layouts", "pp2,interleaved_1f1b,mbs2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_metrics_of_one_process(layout: str, pool: RankPool, references: References) -> None:
    config = config_of("tests.support.recording_models:build", {"vocab_size": 13}, 6)
    assert_agrees(config, layout, pool, references, global_batch=8, steps=2)


@pytest.mark.parametrize("layout", ["tp2,sequence", all_layouts_row("dp2,tp2,sequence,zero3")])
def test_with_a_part_of_the_sequence_on_each_rank(
    layout: str, pool: RankPool, references: References
) -> None:
    config = config_of(
        "tests.support.recording_models:build", {"vocab_size": 13, "own_loss": False}, 6
    )
    assert_agrees(config, layout, pool, references, global_batch=8, steps=2)


def test_numbers_of_a_step_and_of_a_validation(pool: RankPool) -> None:
    config = config_of("tests.support.recording_models:build", {"vocab_size": 13}, 6)
    text = layout_config(config, parse_layout("pp2"), 8, "float64").model_dump_json()
    findings: list[RankFindings] = pool.run(run_layout, 2, text, 2, True)
    assert findings[0].metrics == findings[1].metrics  # on every rank
    assert [sorted(each) for each in findings[0].metrics] == [
        ["accuracy", "inactive_share", "logit", "norm"]
    ] * 4
    assert all(
        0.4 < each["inactive_share"] < 0.6 and each["norm"] > 1 for each in findings[0].metrics
    )


def test_a_count_that_depends_on_the_layout_is_found(
    pool: RankPool, references: References
) -> None:
    config = config_of(
        "tests.support.recording_models:build", {"vocab_size": 13, "counts": "microbatches"}, 6
    )
    row = prove(
        config, parse_layout("dp2,mbs2"), pool, references, global_batch=8, steps=2, twice=False
    )
    assert [
        problem for problem in row.problems if "the recorded metric norm of step 1" in problem
    ] == row.problems
    assert row.problems


def test_a_name_that_the_plan_did_not_see(pool: RankPool) -> None:
    config = config_of("tests.support.recording_models:build", {"vocab_size": 13, "late": True}, 6)
    text = layout_config(config, parse_layout("dp1"), 4, "float64").model_dump_json()
    with raises("MW-MODEL-033", "'late'", "accuracy, inactive_share, logit, norm"):
        pool.run(run_layout, 1, text, 1, True)


def test_a_layer_that_is_recomputed_counts_once(pool: RankPool, references: References) -> None:
    """One of four layers under one name: recorded twice, it would weigh twice."""
    pipeline = {"recompute": "full", "recompute_layers": ["block0"]}
    config = config_of(
        "tests.support.recording_models:build", {"vocab_size": 13}, 6, pipeline=pipeline
    )
    assert_agrees(config, "pp2,full", pool, references, global_batch=4, steps=1)
