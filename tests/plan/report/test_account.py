"""Where the time went: a step whose every second is known,
and the costs found again in a simulation.
"""

from __future__ import annotations

import pytest

from meshwright.schedule.action import Action, Kind
from meshwright.schedule.analysis import Costs, Reading, Span, Timeline, simulate
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.lower import lower
from meshwright_plan.report.account import (
    Account,
    account,
    measured_costs,
    table,
    without_early_steps,
)
from tests.framework.schedule.sizes import smallest


def span(rank: int, action: str, start: float, end: float) -> Span:
    """``span(0, "0F0", 1, 2)``."""
    stage = int(action[0]) if action[0].isdigit() else None
    microbatch = int(action[-1]) if action[-1].isdigit() else None
    return Span(rank, Action(Kind(action.strip("0123456789")), stage, microbatch), start, end)


STEP = Timeline(
    "by hand",
    (
        span(0, "0F0", 0.5, 2.5),
        span(0, "0SEND_F0", 2.5, 2.75),
        span(0, "0RECV_B0", 3, 9),  # sent at 8
        span(0, "0B0", 9, 13),
        span(0, "0REDUCE", 13, 14),
        span(0, "STEP", 14, 16),
        span(1, "1RECV_F0", 0.25, 3),  # sent at 2.5
        span(1, "1F0", 3, 5),
        span(1, "1B0", 5, 8),
        span(1, "1SEND_B0", 8, 8.5),
        span(1, "1REDUCE", 8.5, 9.25),
        span(1, "STEP", 9.25, 15.75),  # the other is there at 14
    ),
)
READINGS = (Reading(0, 0, 0.5), Reading(1, 0, 0.25))


def test_every_second_of_a_step_is_accounted_for() -> None:
    first, second = account(STEP, READINGS)
    assert first == Account(
        0, compute=6, waiting=5, communication=1.25, reduce=1, optimizer=2, data=0.5, other=0.25
    )
    assert second == Account(
        1,
        compute=5,
        waiting=2.25 + 4.75,
        communication=1,
        reduce=0.75,
        optimizer=1.75,
        data=0.25,
        other=0.25,
    )
    assert first.total == second.total == 16


def test_for_a_picture_the_optimizer_begins_when_the_last_rank_is_there() -> None:
    steps = [s for s in without_early_steps(STEP).spans if s.action.kind is Kind.STEP]
    assert [(s.start, s.end) for s in steps] == [(14, 16), (14, 15.75)]
    assert without_early_steps(STEP).spans[:5] == STEP.spans[:5]


def test_sends_that_were_posted_together_count_once() -> None:
    extra = (*STEP.spans, span(1, "1SEND_F1", 8, 8.5))
    assert account(STEP._replace(spans=extra))[1].communication == account(STEP)[1].communication


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_a_simulation_gives_back_its_costs(name: str) -> None:
    schedule = lower(smallest(name, 3, 5))
    costs = [
        Costs(f=1 + stage / 8, b=2 + stage / 4, i=1.5, w=1.25 + stage / 8, comm=0.125, reduce=0.5)
        for stage in range(schedule.num_stages)
    ]
    taken = {
        (action.stage, action.kind)
        for rank in range(schedule.pp)
        for _, action in schedule.actions(rank)
    }
    found = measured_costs(schedule, simulate(schedule, costs))
    for stage, (given, measured) in enumerate(zip(costs, found, strict=True)):
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.REDUCE):
            assert measured.of(kind) == (
                pytest.approx(given.of(kind)) if (stage, kind) in taken else 0
            )
    assert {round(measured.comm, 9) for measured in found} <= {0, 0.125}
    assert found[0].comm == pytest.approx(0.125)


def test_without_messages_that_were_waited_for_a_message_costs_nothing() -> None:
    schedule = lower(build("1f1b", 1, 2))
    assert measured_costs(schedule, simulate(schedule, Costs(step=3))) == (
        Costs(f=1, b=2, i=0, w=0, step=3),
    )


def test_the_table_has_a_line_per_rank_its_mean_and_shares() -> None:
    lines = table(account(STEP, READINGS), 1e-3, "ms").splitlines()
    assert lines[0] == "where the time of the step went, in ms"
    assert lines[1].split() == [
        "rank",
        "compute",
        "waiting",
        "communication",
        "reduce",
        "optimizer",
        "data",
        "other",
        "total",
    ]
    assert lines[2].split() == [
        "0",
        "6000.00",
        "5000.00",
        "1250.00",
        "1000.00",
        "2000.00",
        "500.00",
        "250.00",
        "16000.00",
    ]
    assert lines[4].split()[:3] == ["mean", "5500.00", "6000.00"]
    assert lines[5].split()[:3] == ["share", "34.4%", "37.5%"]
    assert len({len(line) for line in lines[1:]}) == 1
