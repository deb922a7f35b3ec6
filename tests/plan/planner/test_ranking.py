"""Layouts that tie: the simplest comes first, near-duplicates are one line,
each time has its error bar.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config import resolve
from meshwright.errors import ConfigError
from meshwright_plan.commands.comparisons import read_wanted
from meshwright_plan.planner.choice import Choice, choice_of, with_choice
from meshwright_plan.planner.comparison import own_layout, verdict, why_not
from meshwright_plan.planner.explanation import parts, why
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import Plan, RankedLayout, usable_bytes
from meshwright_plan.planner.ranking import (
    TIE_SHARE,
    choose_lines,
    complexity,
    group_alike,
    is_tie,
    simplest,
)
from meshwright_plan.planner.search import search
from meshwright_plan.planner.sweep import sweep, sweep_table
from meshwright_plan.planner.text import describe
from tests.plan.planner.small import cache, hardware
from tests.support.errors import has_code


@pytest.fixture(scope="module")
def settled() -> tuple[ModelCache, Plan]:
    """A settled plan of four devices."""
    bench = cache(samples=8)
    return bench, search(bench, hardware(), 1, best=6, settles=True)


def timed(like: RankedLayout, seconds: float, **fields: int | str) -> RankedLayout:
    """The layout with another time and other fields of its choice."""
    return replace(
        like, choice=like.choice._replace(**fields), time=like.time._replace(total=seconds)
    )


def test_the_simplest_of_a_tie_comes_first(settled: tuple[ModelCache, Plan]) -> None:
    like = settled[1].best[0]
    pipeline = timed(like, 1.00, pp=2, dp=2, tp=1, interleave=4, schedule="interleaved_1f1b")
    plain = timed(like, 1.00 + 0.9 * TIE_SHARE, pp=1, dp=4, tp=1, zero=2)
    # simpler, and no tie with the fastest
    slow = timed(like, 1.01 + TIE_SHARE, pp=1, dp=4, tp=1, zero=1)
    lines = choose_lines([pipeline, plain, slow], 3, lambda each: each)
    assert [(line.layout, line.alike) for line in lines] == [(plain, (slow,)), (pipeline, ())]
    unusable = choose_lines(
        [pipeline, plain, slow], 3, lambda each: None if each is plain else each
    )
    assert unusable[0].layout is pipeline


def test_near_duplicates_are_one_line_of_the_simplest(settled: tuple[ModelCache, Plan]) -> None:
    like = settled[1].best[0]
    many, few = (timed(like, 1.0 + n / 1000, pp=2, dp=2, tp=1, interleave=8 // n) for n in (1, 2))
    other = timed(like, 1.0015, pp=1, dp=4, tp=1)
    lines = group_alike([many, other, few])
    assert [(line.layout, line.alike) for line in lines] == [(few, (many,)), (other, ())]
    assert lines[0].fastest_s == many.time.total


def test_what_a_layout_needs_is_ordered() -> None:
    plain = Choice(1, 8, 1, "1f1b", 1, 1, 4, 1, 8, False, "none", False)
    harder = [
        plain._replace(zero=2),
        plain._replace(zero=3),
        plain._replace(dp=4, tp=2),
        plain._replace(dp=4, pp=2),
        plain._replace(dp=4, pp=2, schedule="interleaved_1f1b", interleave=2),
        plain._replace(dp=2, pp=2, tp=2),
        plain._replace(offload=True),
    ]
    assert all(complexity(plain) < complexity(each) for each in harder)
    assert (
        complexity(harder[3])
        < complexity(harder[4])
        < complexity(harder[5])
        < complexity(harder[6])
    )
    assert (
        complexity(plain)
        < complexity(plain._replace(recompute="half"))
        < complexity(plain._replace(recompute="full"))
    )


def test_a_settled_plan_holds_its_promises(settled: tuple[ModelCache, Plan]) -> None:
    bench, plan = settled
    fastest = min(each.time.total for each in plan.best)
    tied = [each for each in plan.best if is_tie(fastest, each.time.total)]
    assert plan.best[0].choice == simplest(tied).choice
    assert plan.best[0].layout.schedule.is_lowered and plan.best[0].peak_bytes <= usable_bytes(
        plan.hardware
    )
    text = describe(bench, plan)
    first = plan.best[0].time.total
    assert f"{first:.4g} ±{first * plan.error.share:.2g}" in text
    assert f"+{len(next(iter(plan.alike.values())))}" in text
    assert f"±{plan.error.share:.1%}: mean error of " in text


def test_the_reason_of_a_lead_a_tie_and_a_simpler_layout(settled: tuple[ModelCache, Plan]) -> None:
    first = settled[1].best[0]
    seconds = first.time.total
    slower = replace(
        first, time=first.time._replace(total=2 * seconds, optimizer=first.time.optimizer + seconds)
    )
    assert "in the optimizer" in why(first, slower) and "tie" not in why(first, slower)
    near = replace(
        first,
        time=first.time._replace(
            total=1.01 * seconds, optimizer=first.time.optimizer + 0.01 * seconds
        ),
    )
    assert why(first, near).endswith("a tie (below 2%)")
    assert "the first is simpler" in why(near, first)
    assert sum(parts(first).values()) == pytest.approx(seconds)
    assert verdict(first, slower) == "100.0% slower than the first"
    assert verdict(first, near).startswith("a tie with the first: +1.0%")


def test_a_wanted_layout_is_compared_with_the_first(settled: tuple[ModelCache, Plan]) -> None:
    bench, plan = settled
    said, *table = why_not(bench, plan, {"tp": 4, "micro_batch_size": 2})
    assert said.startswith("the best with tp=4 micro_batch_size=2: pp 1 x dp 1 x tp 4, 2 x 4")
    assert {row.split("  ")[0] for row in table} >= {
        "computation",
        "tensor-parallel messages",
        "step",
        "memory",
    }
    refused = why_not(bench, plan, {"pp": 8})
    assert refused[0] == "no layout with pp=8 works"
    assert why_not(bench, plan, {"dp": 4, "zero": 0})[0].startswith("the best with dp=4 zero=0: ")
    assert why_not(bench, plan, {"pp": 1, "interleave": 7})[1:] == [
        "  no layout of the search has these values"
    ]


def test_a_wanted_schedule_that_cannot_be_has_its_reason(
    settled: tuple[ModelCache, Plan],
) -> None:
    """The error of a schedule is an answer: the plan itself is found already."""
    said, reason = why_not(*settled, {"schedule": "1f1b", "interleave": 2})
    assert said == "no layout with schedule=1f1b interleave=2 works"
    assert "interleave" in reason or "stage" in reason


def test_the_users_own_layout_has_its_place(settled: tuple[ModelCache, Plan]) -> None:
    bench, plan = settled
    (line,) = own_layout(bench, plan, plan.best[1].config)
    assert line.startswith("your own layout is number 2: ")
    slow = next(each for each in plan.best if each.choice.dp > 1).choice._replace(
        zero=3, recompute="full"
    )
    config = resolve(with_choice(bench.config, slow), 4)
    said, *table = own_layout(bench, plan, config)
    assert str(slow) in said and ("behind the 6 above" in said or "number " in said) and table
    with_too_little = replace(
        plan, hardware=plan.hardware.model_copy(update={"memory_bytes": 1000})
    )
    assert "and does not fit: " in own_layout(bench, with_too_little, config)[0]


@pytest.mark.parametrize(
    ("text", "code"), [("tp=x", "079"), ("color=8", "079"), ("recompute=some", "079"), (",", "080")]
)
def test_wrong_fields_are_refused(text: str, code: str) -> None:
    with pytest.raises(ConfigError, check=has_code("MW-LAUNCH-079", "MW-LAUNCH-080")) as error:
        read_wanted(text)
    assert error.value.code == f"MW-LAUNCH-{code}"


def test_fields_are_read() -> None:
    assert read_wanted("tp=8,schedule=1f1b recompute=half") == {
        "tp": 8,
        "schedule": "1f1b",
        "recompute": "half",
    }


def test_a_choice_with_half_of_the_layers_recomputed_goes_to_a_configuration_and_back() -> None:
    bench = cache()
    choice = Choice(1, 2, 1, "1f1b", 1, 1, 4, 1, 2, False, "half", False)
    config = with_choice(bench.config, choice)
    assert bench.recomputed(config.pipeline) == ("block0",)
    assert choice_of(config) == choice


def test_a_sweep_has_a_point_for_each_combination(settled: tuple[ModelCache, Plan]) -> None:
    bench, plan = settled
    points = sweep(bench, plan.hardware, [1, 2], [8, 7])
    assert [(each.nodes, each.devices, each.global_batch) for each in points] == [
        (1, 4, 8), (2, 8, 8), (1, 4, 7), (2, 8, 7),
    ]  # fmt: skip
    assert points[0].layout is not None and points[0].layout.choice == plan.best[0].choice
    assert points[0].device_hours == pytest.approx(4 * 1e12 / points[0].tokens_per_s / 3600)
    header, *rows = sweep_table(points, 2.0, 0.065)
    assert "cost / 10^12 tokens" in header and f"{points[0].device_hours * 2:,.0f}" in rows[0]
    assert "device-hours / 10^12 tokens" in sweep_table(points, None, 0.065)[0]
