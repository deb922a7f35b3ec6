"""Units of ZeRO-3 and weights that stay gathered, in a search: what is tried, its time and memory."""

from __future__ import annotations

import pytest

from meshwright_plan.planner.choice import Choice, Rejection, choice_of, with_choice
from meshwright_plan.planner.choices import GATHERS, choices
from meshwright_plan.planner.estimates import estimate_bytes, estimate_s
from meshwright_plan.planner.experts import PAIRED
from meshwright_plan.planner.hardware import Link
from meshwright_plan.planner.plan import RankedLayout, evaluate
from meshwright_plan.planner.ranking import complexity
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.search import search
from meshwright_plan.planner.text import table
from tests.plan.planner.small import cache, hardware

SLOW = hardware(
    kind="cpu", flops_per_s={"bfloat16": 1e12}, node_link=Link(bytes_per_s=1e9, latency_s=1e-4)
)
"""Links on which both the bytes and the number of messages show. Messages overlap nothing."""


def choice(pp: int = 1, unit_layers: int = 1, kept: bool = False, schedule: str = "1f1b") -> Choice:
    dp = 4 // pp
    found = Choice(pp, dp, 1, schedule, 1, 1, 8 // dp, 3, dp, False, "none", False)
    return found._replace(unit_layers=unit_layers, keeps_gathered=kept)


def evaluated(of: Choice) -> RankedLayout:
    bench = cache()
    return evaluate(bench, SLOW, with_choice(bench.config, of), of)


def test_a_search_tries_them_with_zero3_alone() -> None:
    bench = cache()
    offered = [each for each in choices(bench, SLOW, 1) if not isinstance(each, Rejection)]
    for zero in (1, 2, 3):
        found = {(c.unit_layers, c.keeps_gathered) for c in offered if c.zero == zero}
        assert found == set(GATHERS if zero == 3 else GATHERS[:1])
    assert not any(c.schedule == PAIRED and c.unit_layers > 1 for c in offered)
    for each in offered[::7]:
        assert choice_of(with_choice(bench.config, each)) == each


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gathers_take_their_messages_and_bytes(schedule: str) -> None:
    """5 layers of 2 micro-batches a replica, gathered in forward and backward; reduced once."""
    alone = {each: evaluated(choice(1, *each)) for each in GATHERS}
    link, elements = SLOW.node_link, sum(e.dense for e in alone[1, False].layout.elements)
    share = 3 / 4
    gather_s = elements * 2 * share / link.bytes_per_s
    for (unit_layers, kept), found in alone.items():
        messages = -(-5 // unit_layers)
        each_s = gather_s + messages * 3 * link.latency_s  # a ring of 4 has 3 steps
        gathers = 1 if kept else 2
        forward_and_backward = found.time.gather + found.time.reduce
        base = alone[1, False].time
        base_s = base.gather + base.reduce
        saved_s = 2 * (2 * (gather_s + 15 * link.latency_s) - gathers * each_s)
        reduce_s = 2 * (5 - messages) * 3 * link.latency_s
        assert base_s - forward_and_backward == pytest.approx(saved_s + reduce_s, rel=0.02)
    in_stages = [evaluated(choice(2, kept=kept, schedule=schedule)).time for kept in (False, True)]
    assert in_stages[1].total < in_stages[0].total


def test_estimates_are_near_what_is_evaluated() -> None:
    bench = cache()
    for each in GATHERS:
        of = choice(1, *each)
        found = evaluate(bench, SLOW, with_choice(bench.config, of), of)
        expected = estimate_s(bench, PerformanceModel.of(SLOW), of)
        assert expected == pytest.approx(found.time.total, rel=1e-6)
    kept, freed = (estimate_bytes(bench, choice(kept=each)) for each in (True, False))
    (elements,) = evaluated(choice()).layout.elements
    assert kept - freed == 2 * elements.dense


def test_a_plan_names_them_and_prefers_the_default_in_a_tie() -> None:
    first = choice()
    for each in GATHERS[1:]:
        assert complexity(choice(1, *each)) > complexity(first)
    of = choice(1, 4, True)
    assert "ZeRO-3 unit4 kept" in str(of)
    bench = cache().replaced(pins={"pp": 1, "tp": 1, "zero": 3, "unit_layers": 4})
    found = search(bench, SLOW, 1, best=2)
    assert found.best and all(each.choice.unit_layers == 4 for each in found.best)
    assert any(" 3 unit4" in line for line in table(bench, found.best, found))
    assert found.best[0].config.parallel.unit_layers == 4
