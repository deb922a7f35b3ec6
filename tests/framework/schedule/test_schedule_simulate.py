"""The simulator against published bubbles, against the recurrence of the data dependencies,
and its own rules.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.action import (
    COMMUNICATION,
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Item,
    Kind,
    Schedule,
    actions_of,
)
from meshwright.schedule.analysis import Costs, Span, Timeline, bubble_share, simulate
from meshwright.schedule.analysis.simulator import Channel
from meshwright.schedule.build import build
from meshwright.schedule.load import parse_schedule
from meshwright.schedule.lower import lower
from tests.framework.schedule.sizes import built
from tests.support.errors import raises
from tests.support.marks import marked_rows

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "bubbles.py"
spec = importlib.util.spec_from_file_location("bubbles", BENCHMARK)
assert spec is not None and spec.loader is not None
bubbles = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bubbles)
PROFILES = bubbles.profiles()
MISSES = {"1F1B": 0.0, "ZB-H1": 0.0, "ZB-H2": 0.0, "1F1B-I": 0.0050, "ZB-V": 0.0015}
"""How far docs/schedules.md says that we are from what is published."""


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(schedule=built(), data=st.data())
def test_the_pace_is_that_of_the_lowered_schedule(schedule: Schedule, data: st.DataObject) -> None:
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.planner.fast_simulation import simulate_fast

    seconds = st.floats(0, 3, allow_nan=False)
    costs = [Costs(*(data.draw(seconds) for _ in range(5))) for _ in range(schedule.num_stages)]
    lowered = simulate(lower(schedule), costs)
    assert simulate_fast(schedule, costs).spans == tuple(
        span for span in lowered.spans if span.action.kind in COMPUTE
    )


def test_a_pace_that_nobody_can_keep_is_refused() -> None:
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.planner.fast_simulation import simulate_fast

    hanging = parse_schedule("# mine pp=2 num_stages=2 chunks=1 placement=loop\n0B0 0F0\n1F0 1B0")
    with raises("MW-SCHEDULE-008", "mine"):
        simulate_fast(hanging, [Costs()] * 2)


@marked_rows(
    "long",
    "5-14.6B-p16-m48",
    "5-28.3B-p32-m256",
    "8-6.2B-p16-m48",
    "8-14.6B-p24-m192",
    "8-28.3B-p32-m256",
)
@pytest.mark.parametrize(
    "profile", PROFILES, ids=lambda row: f"{row.table}-{row.model}-p{row.pp}-m{row.chunks}"
)
def test_published_bubbles(profile: Any) -> None:
    """1F1B in all rows; the others in those that are small enough for a fast test."""
    is_small = profile.pp * profile.chunks < 800 and profile.chunks != 64
    for name, published in profile.published.items():
        if name == "1F1B" or is_small:
            assert abs(round(bubbles.ours(profile, name), 4) - published) <= MISSES[name] + 1e-9
    if is_small:
        assert round(bubbles.without_waits_at_the_turn(profile), 4) == profile.published["1F1B-I"]


def test_rendezvous_is_slower_than_buffered_but_not_by_much() -> None:
    profile = PROFILES[0]
    schedule, costs = lower(build("1f1b", profile.pp, profile.chunks)), profile.costs(1)
    buffered = bubble_share(simulate(schedule, costs))
    assert (
        buffered <= bubble_share(simulate(schedule, costs, Channel.RENDEZVOUS)) < buffered + 0.005
    )


@pytest.mark.long
def test_the_table_in_the_docs_is_what_the_benchmark_prints() -> None:
    """Two rows of it; ``python benchmarks/bubbles.py --write`` makes them all."""
    written = bubbles.DOCS.read_text(encoding="utf-8")
    assert len(PROFILES) == 21
    assert written.partition(bubbles.BEGIN)[2].partition(bubbles.END)[0].count("\n") == 2 + len(
        PROFILES
    )
    for profile in (PROFILES[0], PROFILES[12]):
        assert bubbles.table_row(profile) + "\n" in written


ticks = st.integers(0, 9)


@st.composite
def scheduled_costs(draw: st.DrawFn) -> tuple[Schedule, list[Costs]]:
    schedule = lower(draw(built(max_pp=6, max_chunks=8)))
    costs = [
        Costs(
            f=draw(ticks) + 1,
            b=draw(ticks),
            i=draw(ticks),
            w=draw(ticks),
            comm=draw(ticks),
            step=draw(ticks),
        )
        for _ in range(schedule.num_stages)
    ]
    return schedule, costs


@pytest.mark.long
@settings(deadline=None)
@given(scheduled_costs())
def test_buffered_times_are_the_longest_paths(case: tuple[Schedule, list[Costs]]) -> None:
    """Each computation starts when its rank is free and what it needs has arrived; no machine,
    only the recurrence.

    The halves of a pair need what either needs, and others get what either makes when both are
    done.
    """
    schedule, costs = case
    timeline = simulate(schedule, costs, Channel.BUFFERED)
    before: dict[Item, Item | None] = {}
    for rank in range(schedule.pp):
        row = [item for item in schedule.rows[rank] if actions_of(item)[0].kind in COMPUTE]
        before |= dict(zip(row, [None, *row], strict=False))
    item_of = {action: item for item in before for action in actions_of(item)}
    sources = {
        Kind.F: (-1, [Kind.F]),
        Kind.B: (1, [Kind.B, Kind.I]),
        Kind.I: (1, [Kind.B, Kind.I]),
        Kind.W: (0, []),
    }

    def arrives(action: Action) -> float:
        assert action.stage is not None
        offset, kinds = sources[action.kind]
        source = action.stage + offset
        needed = [
            item_of[each]
            for kind in kinds
            if (each := Action(kind, source, action.microbatch)) in item_of
        ]
        is_message = schedule.rank_of(source) != schedule.rank_of(action.stage)
        return max(
            [0.0, *(end(each) + (costs[source].comm if is_message else 0) for each in needed)]
        )

    def own(action: Action) -> float:
        return costs[action.stage or 0].of(action.kind)

    @cache
    def end(item: Item) -> float:
        earlier, actions = before[item], actions_of(item)
        ready = max(map(arrives, actions))
        return max(ready, 0.0 if earlier is None else end(earlier)) + sum(map(own, actions))

    computed = {span.action: span.end for span in timeline.spans if span.action.kind in COMPUTE}
    expected = {}
    for item in before:
        first, *second = actions_of(item)
        expected |= {
            first: end(item) - sum(map(own, second)),
            **{each: end(item) for each in second},
        }
    assert computed == expected


@settings(deadline=None)
@given(scheduled_costs(), st.sampled_from(Channel))
def test_every_action_has_one_span_and_a_rank_does_one_item_at_a_time(
    case: tuple[Schedule, list[Costs]], channel: Channel
) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs, channel)
    assert timeline.ranks == tuple(range(schedule.pp))
    for rank in range(schedule.pp):
        spans = [span for span in timeline.spans if span.rank == rank]
        actions = list(schedule.actions(rank))
        assert sorted(span.action for span in spans) == sorted(action for _, action in actions)
        computations = [action for _, action in actions if action.kind not in COMMUNICATION]
        assert [
            span.action for span in spans if span.action.kind not in COMMUNICATION
        ] == computations
        item_of = {action: item for item in schedule.rows[rank] for action in actions_of(item)}
        for at, (span, after) in enumerate(pairwise(spans)):
            # the next item uses it; the receives of an F/B pair wait together
            if span.action.kind in RECEIVES:
                used = next(each.action for each in spans[at:] if each.action.kind in COMPUTE)
                assert span.action in map(schedule.receive_for, actions_of(item_of[used]))
            waited = spans[at - 1 : at] if span.action.kind in RECEIVES else []
            end = max(
                each.end for each in (span, *waited) if each.action.kind in RECEIVES or each is span
            )
            together = any(
                {span.action.kind, after.action.kind} <= kinds for kinds in (SENDS, RECEIVES)
            )
            assert (
                end == after.start
                or together
                or (channel is Channel.RENDEZVOUS and end < after.start)
            )


def test_a_rendezvous_message_leaves_when_both_are_there_and_a_buffered_one_when_it_is_sent() -> (
    None
):
    """Rank 1 is busy for 5 ticks before it receives; the message takes 2.
    A buffered one has come by then.
    """
    schedule = parse_schedule(
        "# hand pp=2 num_stages=2 chunks=2 placement=loop\n0F0 0SEND_F0 STEP\n1F1 1RECV_F0 1F0"
        " STEP\n"
    )
    costs = [Costs(f=1, comm=2), Costs(f=5, comm=100)]
    for channel, sent_at, received_at in [(Channel.RENDEZVOUS, 7, 7), (Channel.BUFFERED, 1, 5)]:
        spans = {span.action: span for span in simulate(schedule, costs, channel).spans}
        assert spans[Action(Kind.SEND_F, 0, 0)].end == sent_at
        assert spans[Action(Kind.RECV_F, 1, 0)][:4] == (
            1,
            Action(Kind.RECV_F, 1, 0),
            5,
            received_at,
        )


def test_a_buffered_receive_holds_the_computation_that_uses_it_and_nothing_before_it() -> None:
    """Rank 1 posts its receive first, computes for 3 ticks,
    and waits from 3 to 9 for what is sent at 1 and takes 8.
    """
    schedule = parse_schedule(
        "# hand pp=2 num_stages=2 chunks=2 placement=loop\n0F0 0SEND_F0 0F1 STEP\n1RECV_F0 1F1 1F0"
        " STEP\n"
    )
    costs = [Costs(f=1, comm=8), Costs(f=3)]
    assert [
        (str(span.action), span.start, span.end) for span in simulate(schedule, costs).spans
    ] == [
        ("0F0", 0, 1),
        ("0SEND_F0", 1, 1),
        ("0F1", 1, 2),
        ("STEP", 2, 2),
        ("1F1", 0, 3),
        ("1RECV_F0", 3, 9),
        ("1F0", 9, 12),
        ("STEP", 12, 12),
    ]
    harsh = simulate(schedule, costs, Channel.RENDEZVOUS).spans
    assert (Action(Kind.F, 0, 1), 9, 10) in [span[1:4] for span in harsh]


def test_step_costs_the_stages_of_its_rank_and_reduce_its_own() -> None:
    schedule = lower(
        parse_schedule("# hand pp=1 num_stages=2 chunks=1 placement=loop\n0F0 1F0 1B0 0B0\n")
    )
    costs = [Costs(f=1, b=1, reduce=10, step=100), Costs(f=1, b=1, reduce=20, step=200)]
    took = {str(span.action): span.end - span.start for span in simulate(schedule, costs).spans}
    assert took == {
        "0F0": 1,
        "1F0": 1,
        "1B0": 1,
        "1REDUCE": 20,
        "0B0": 1,
        "0REDUCE": 10,
        "STEP": 300,
    }


def test_bubble_share_says_idle_over_total_time() -> None:
    """2 ranks x 10 ticks from the first F to the last B, 8 of the 20 computed;
    REDUCE and STEP are outside of it.
    """
    spans = (
        Span(0, Action(Kind.F, 0, 0), 100, 102),
        Span(0, Action(Kind.B, 0, 0), 108, 110),
        Span(0, Action(Kind.REDUCE, 0), 110, 150),
        Span(1, Action(Kind.RECV_F, 1, 0), 90, 103),
        Span(1, Action(Kind.F, 1, 0), 103, 107),
        Span(1, Action(Kind.STEP), 150, 160),
    )
    assert bubble_share(Timeline("measured", spans)) == 12 / 20
    assert bubble_share(Timeline("measured", spans[:3])) == 6 / 10  # one rank's own clock will do


def test_what_cannot_be_simulated() -> None:
    with raises("MW-SCHEDULE-006"):
        simulate(build("1f1b", 2, 2), Costs())
    text = (
        "# hand pp=2 num_stages=2 chunks=1 placement=loop\n0F0 0RECV_B0 0B0 STEP\n1RECV_F0 1F0"
        " STEP\n"
    )
    with raises(
        "MW-SCHEDULE-007", "rank 0 at position 2 (0RECV_B0), rank 1 at position 1 (1RECV_F0)"
    ):
        simulate(parse_schedule(text), Costs())
    with raises("MW-SCHEDULE-007", "rendezvous", "rank 0 at position 2 (0RECV_B0), rank 1 at"):
        simulate(parse_schedule(text), Costs(), Channel.RENDEZVOUS)
