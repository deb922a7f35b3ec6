"""Each fault is planted and must come back under its own name;
and a deadlock oracle that knows nothing of clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.action import RECEIVES, SENDS, Action, Item, Kind, Schedule, actions_of
from meshwright.schedule.analysis import Costs, check, report
from meshwright.schedule.analysis.faults import Fault, Problem
from meshwright.schedule.analysis.simulator import Channel, play
from meshwright.schedule.build import build
from meshwright.schedule.load import format_schedule, parse_schedule
from meshwright.schedule.lower import lower
from tests.framework.schedule.sizes import built

SOUND = lower(build("1f1b", 3, 4))


def with_row(schedule: Schedule, rank: int, items: list[Item]) -> Schedule:
    rows = list(schedule.rows)
    rows[rank] = tuple(items)
    return replace(schedule, rows=tuple(rows))


def without(schedule: Schedule, rank: int, dropped: Action) -> Schedule:
    items = (tuple(a for a in actions_of(item) if a != dropped) for item in schedule.rows[rank])
    return with_row(schedule, rank, [item[0] if len(item) == 1 else item for item in items if item])


def edited(schedule: Schedule, *replacements: tuple[str, str]) -> Schedule:
    """Return the schedule with words of its text replaced; each must be there exactly once."""
    text = format_schedule(schedule)
    for old, new in replacements:
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    return parse_schedule(text)


def faults(problems: list[Problem]) -> set[Fault]:
    return {problem.fault for problem in problems}


def test_sound_schedules_have_no_problem() -> None:
    assert check(SOUND) == []
    assert report(SOUND, []) == "1f1b pp=3 chunks=4: no problem found"


SOUND_V = lower(build("zb_v", 2, 2, 2))
EVERY_ACTION = [
    pytest.param(schedule, rank, action, id=f"{schedule.name}-{action}")
    for schedule in (SOUND, SOUND_V)
    for rank in range(schedule.pp)
    for _, action in schedule.actions(rank)
]


@pytest.mark.parametrize(("schedule", "rank", "action"), EVERY_ACTION)
def test_whatever_is_dropped_is_missing(schedule: Schedule, rank: int, action: Action) -> None:
    """A receive, a send, a computation, REDUCE, STEP: each of them, one at a time."""
    problems = check(without(schedule, rank, action))
    name = {Kind.W: Fault.WEIGHTS_MISSING, **dict.fromkeys(RECEIVES, Fault.RECEIVE_MISSING)}.get(
        action.kind
    )
    expected = name or (Fault.SEND_MISSING if action.kind in SENDS else Fault.MISSING)
    missing = [(problem.rank, problem.action) for problem in problems if problem.fault is expected]
    assert missing == [(rank, action)]


@pytest.mark.parametrize(("schedule", "rank", "action"), EVERY_ACTION)
def test_whatever_is_done_twice_is_repeated(schedule: Schedule, rank: int, action: Action) -> None:
    """Directly after the first time, where no order is violated by it."""
    items: list[Item] = []
    for item in schedule.rows[rank]:
        items += [item, action] if action in actions_of(item) else [item]
    problems = check(with_row(schedule, rank, items))
    assert [(p.rank, p.action) for p in problems if p.fault is Fault.REPEATED] == [(rank, action)]


def test_exactly_the_position_is_named() -> None:
    (problem,) = check(edited(SOUND, ("2F3 2B3", "2F3 2B3 2F3")))
    assert (problem.fault, problem.rank, problem.position, str(problem.action)) == (
        Fault.REPEATED,
        2,
        15,
        "2F3",
    )
    assert SOUND.rows[2][13] == problem.action


def test_crossed_messages() -> None:
    """Sent 0 1 and received 1 0: under matching in order rank 1 would compute
    on the wrong micro-batch, unnoticed.
    """
    crossed = parse_schedule(
        "# hand pp=2 num_stages=2 chunks=2 placement=loop\n"
        "0F0 0F1 {0SEND_F0+0SEND_F1} 0RECV_B1 0B1 0RECV_B0 0B0 0REDUCE STEP\n"
        "{1RECV_F1+1RECV_F0} 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0 1REDUCE STEP\n"
    )
    (problem,) = check(crossed)
    assert (problem.fault, problem.rank, str(problem.action)) == (Fault.CROSSED, 1, "1RECV_F1")
    assert "0SEND_F0" in problem.text
    assert check(edited(crossed, ("{1RECV_F1+1RECV_F0}", "{1RECV_F0+1RECV_F1}"))) == []


def test_two_ranks_that_both_send_first_hang_under_rendezvous_only() -> None:
    crossing = parse_schedule(
        "# hand pp=2 num_stages=2 chunks=2 placement=loop\n"
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE STEP\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE STEP\n"
    )
    problems = check(crossing)
    assert [(p.fault, p.rank, str(p.action)) for p in problems] == [
        (Fault.DEADLOCK, 0, "0SEND_F1"),
        (Fault.DEADLOCK, 1, "1SEND_B0"),
    ]
    assert "rank 1 is at position 3, 1SEND_B0" in problems[0].text
    assert check(crossing, Channel.BUFFERED) == []
    assert check(edited(crossing, ("0SEND_F1 0RECV_B0", "{0SEND_F1+0RECV_B0}"))) == []


ONE_RANK = "# hand pp=1 num_stages=2 chunks=2 placement=loop\n"


@pytest.mark.parametrize(
    ("row", "late", "early"),
    [
        ("1F0 0F0 1B0 0B0 0F1 1F1 1B1 0B1", "0F0", "1F0"),
        ("0F0 1F0 0B0 1B0 0F1 1F1 1B1 0B1", "1B0", "0B0"),
        ("0F0 1F0 0I0 1I0 0W0 1W0 0F1 1F1 1B1 0B1", "1I0", "0I0"),
    ],
)
def test_order_between_stages_of_one_rank(row: str, late: str, early: str) -> None:
    """They hand over without a message, so that only their order in the row says
    that the input is there.
    """
    problems = check(lower(parse_schedule(f"{ONE_RANK}{row}\n")))
    assert [(p.fault, str(p.action)) for p in problems] == [(Fault.USED_TOO_EARLY, early)]
    assert f"needs {late}," in problems[0].text


def test_an_unlowered_schedule_does_not_run() -> None:
    problems = check(build("1f1b", 2, 1))
    assert faults(problems) == {Fault.MISSING, Fault.RECEIVE_MISSING, Fault.SEND_MISSING}
    assert {str(p.action) for p in problems} == {
        *("0SEND_F0", "0RECV_B0", "1RECV_F0", "1SEND_B0"),
        *("0REDUCE", "1REDUCE", "STEP"),
    }


def test_the_report_points_at_the_place() -> None:
    broken = edited(SOUND, ("2F3 2B3", "2F3 2B3 2F3"))
    lines = report(broken, check(broken)).split("\n")
    assert lines[0] == "1f1b pp=3 chunks=4: 1 x repeated"
    assert lines[2].startswith("repeated: rank 2, position 15: 2F3 stands at position 13 already")
    row, arrow = lines[-2:]
    assert row.startswith("    2 | … 2SEND_B2 ")
    assert row[arrow.index("^") :].startswith("2F3 ")
    assert arrow.endswith("^ repeated")


def test_a_long_report_is_cut() -> None:
    problems = check(build("gpipe", 4, 8))
    assert report(SOUND, problems[:9], limit=2).endswith("and 7 more")


# -------------------------------------------------------------------------------------------------
# the deadlock oracle


def can_finish(schedule: Schedule, pick: Callable[[list[int]], int]) -> bool:
    """Return whether a rendezvous machine comes to its end. Ranks move one at a time,
    in whatever order ``pick`` likes.

    An open send holds its rank; an open receive holds the computation that uses it.
    """
    rows = [deque(row) for row in schedule.rows]
    open_messages: list[set[Action]] = [set() for _ in rows]

    def is_free(rank: int) -> bool:
        held = any(action.kind in SENDS for action in open_messages[rank])
        first = actions_of(rows[rank][0])[0] if rows[rank] else None
        return (
            first is not None
            and not held
            and schedule.receive_for(first) not in open_messages[rank]
        )

    # posted: sends, receives
    channels: dict[tuple[int, int], tuple[deque[Action], deque[Action]]] = {}
    while True:
        free = [rank for rank in range(len(rows)) if is_free(rank)]
        if not free:
            return not any(rows) and not any(open_messages)
        rank = pick(free)
        item = rows[rank].popleft()
        for action in actions_of(item):
            if action.kind in SENDS or action.kind in (Kind.RECV_F, Kind.RECV_B):
                peer, is_send = schedule.peer(action), action.kind in SENDS
                key = (rank, peer) if is_send else (peer, rank)
                sends, receives = channels.setdefault(key, (deque(), deque()))
                (sends if is_send else receives).append(action)
                open_messages[rank].add(action)
                while sends and receives:
                    open_messages[key[0]].discard(sends.popleft())
                    open_messages[key[1]].discard(receives.popleft())


@st.composite
def shaken(draw: st.DrawFn) -> Schedule:
    """Return a schedule with some groups opened and some neighbours exchanged: many of these hang,
    many do not.
    """
    schedule = lower(draw(built(max_pp=4, max_chunks=5)))
    for rank in range(schedule.pp):
        items: list[Item] = []
        for item in schedule.rows[rank]:
            items += actions_of(item) if draw(st.integers(0, 3)) == 0 else [item]
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(0, len(items) - 2))
            items[at : at + 2] = items[at + 1], items[at]
        schedule = with_row(schedule, rank, items)
    return schedule


@pytest.mark.long
@settings(deadline=None, max_examples=300)
@given(shaken(), st.randoms(use_true_random=False))
def test_deadlocks_are_those_of_a_machine_without_clocks(
    schedule: Schedule, random: object
) -> None:
    _, blocked = play(schedule, Costs(), Channel.RENDEZVOUS)
    assert can_finish(schedule, random.choice) == (not blocked)  # type: ignore[attr-defined]
    assert (Fault.DEADLOCK in faults(check(schedule))) == bool(blocked)


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(shaken())
def test_what_hangs_with_buffered_sends_hangs_with_rendezvous_too(schedule: Schedule) -> None:
    if Fault.DEADLOCK in faults(check(schedule, Channel.BUFFERED)):
        assert Fault.DEADLOCK in faults(check(schedule, Channel.RENDEZVOUS))
