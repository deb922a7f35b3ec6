"""Faults planted in a schedule that a user brings as text: each is named,
with the grid and an arrow under its place.

Once in computations alone, which are lowered first, and once in rows that hold their communication.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.analysis import Costs, check, report
from meshwright.schedule.analysis.faults import Fault
from meshwright.schedule.analysis.simulator import Channel, play
from meshwright.schedule.load import read_schedule
from meshwright.schedule.lower import lower
from tests.framework.schedule.sizes import built

COMPUTED = """\
# two ranks, the V by hand
# mine pp=2 num_stages=4 chunks=3 placement=v
0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 1W1 2I2 1I2 2W2 1W2
"""
LOWERED = """\
# mine pp=2 num_stages=2 chunks=2 placement=loop
0F0 0SEND_F0 0F1 {0SEND_F1+0RECV_B0} 0I0 0W0 0RECV_B1 0I1 0W1 0REDUCE STEP
1RECV_F0 1F0 1I0 1W0 {1SEND_B0+1RECV_F1} 1F1 1I1 1SEND_B1 1W1 1REDUCE STEP
"""


def checked(path: Path, text: str, *edits: tuple[str, str]) -> tuple[Schedule, list[Fault], str]:
    """What is in the file after the edits, the faults that are found, causes first,
    and their report.
    """
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    schedule = read_schedule(path)
    schedule = schedule if schedule.is_lowered else lower(schedule)
    problems = check(schedule)
    return schedule, [problem.fault for problem in problems], report(schedule, problems)


def test_they_are_sound_without_an_edit(tmp_path: Path) -> None:
    for text in (COMPUTED, LOWERED):
        assert checked(tmp_path / "mine.txt", text)[1] == []


SEEDED = [
    ("drop a receive", LOWERED, ("{0SEND_F1+0RECV_B0}", "0SEND_F1"), Fault.RECEIVE_MISSING, "0I0"),
    ("drop a send", LOWERED, ("{1SEND_B0+1RECV_F1}", "1RECV_F1"), Fault.SEND_MISSING, "1W0"),
    ("drop a W", COMPUTED, ("3W1 ", ""), Fault.WEIGHTS_MISSING, "3SEND_B1"),
    ("drop an F", COMPUTED, ("2F1 ", ""), Fault.MISSING, "2I1"),
    ("swap I and F", COMPUTED, ("3F1 3I1", "3I1 3F1"), Fault.BACKWARD_TOO_EARLY, "3I1"),
    ("swap across the turn", COMPUTED, ("1F0 2F0", "2F0 1F0"), Fault.USED_TOO_EARLY, "2F0"),
    ("swap a send and its F", LOWERED, ("0F0 0SEND_F0", "0SEND_F0 0F0"), Fault.SENT_TOO_EARLY, "0SEND_F0"),
    ("use before its receive", LOWERED, ("1RECV_F0 1F0", "1F0 1RECV_F0"), Fault.USED_TOO_EARLY, "1F0"),
    ("a gradient before its receive", LOWERED, ("0RECV_B1 0I1", "0I1 0RECV_B1"), Fault.USED_TOO_EARLY, "0I1"),
    ("a gradient sent too early", LOWERED, ("1I1 1SEND_B1", "1SEND_B1 1I1"), Fault.SENT_TOO_EARLY, "1SEND_B1"),
    ("no such message", LOWERED, ("1F1 1I1", "1F1 1SEND_F1 1I1"), Fault.UNEXPECTED, "1SEND_F1"),
    ("no such stage", COMPUTED, ("0F2", "0F2 4F2"), Fault.UNEXPECTED, "4F2"),
    ("a micro-batch twice", COMPUTED, ("0F2", "0F2 0F1"), Fault.REPEATED, "0F1"),
    ("W before its I", COMPUTED, ("2I1 2W1", "2W1 2I1"), Fault.WEIGHTS_TOO_EARLY, "2W1"),
    ("cross two sends", LOWERED, ("0SEND_F0 0F1 {0SEND_F1+0RECV_B0}", "0F1 {0SEND_F1+0SEND_F0+0RECV_B0}"),
     Fault.CROSSED, "1RECV_F0"),
    ("wrong rank", COMPUTED, ("0F2 3F0", "0F2 2F0 3F0"), Fault.WRONG_RANK, "2F0"),
    ("I and B both", COMPUTED, ("3I1 3W1", "3B1 3I1 3W1"), Fault.BACKWARD_TWICE, "3B1"),
    ("B for I alone", COMPUTED, ("3I1 3W1", "3B1 3W1"), Fault.BACKWARD_TWICE, "3W1"),
    ("no such micro-batch", COMPUTED, ("0F2", "0F2 0F3"), Fault.UNEXPECTED, "0F3"),
    ("reduce too early", LOWERED, ("0I1 0W1 0REDUCE", "0I1 0REDUCE 0W1"), Fault.REDUCED_TOO_EARLY, "0REDUCE"),
    ("step too early", LOWERED, ("1W1 1REDUCE STEP", "1W1 STEP 1REDUCE"), Fault.STEP_NOT_LAST, "STEP"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "edit", "fault", "at"), [case[1:] for case in SEEDED], ids=[case[0] for case in SEEDED]
)
def test_seeded(text: str, edit: tuple[str, str], fault: Fault, at: str, tmp_path: Path) -> None:
    _, found, said = checked(tmp_path / "mine.txt", text, edit)
    assert found[0] is fault
    lines = said.split("\n")
    arrow = next(number for number, line in enumerate(lines) if line.endswith(f"^ {fault}"))
    assert lines[arrow - 1].lstrip()[0].isdigit()  # a row of the grid
    word = lines[arrow - 1][lines[arrow].index("^") :].split(" ")[0]
    assert at in word.strip("{}").split("+")


def test_rows_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends 1;
    rank 1 wants 1 before it makes that gradient.
    """
    text = "# mine pp=2 num_stages=2 chunks=2 placement=loop\n0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n"
    for channel in Channel:
        path = tmp_path / "mine.txt"
        path.write_text(text)
        schedule = lower(read_schedule(path))
        problems = check(schedule, channel)
        assert {problem.fault for problem in problems} == {Fault.DEADLOCK}
        assert {problem.rank for problem in problems} == {0, 1}
        assert "^ deadlock" in report(schedule, problems)


@st.composite
def broken(draw: st.DrawFn) -> tuple[Schedule, set[Fault]]:
    """A built schedule with one computation dropped, doubled, moved, or given to another rank;
    what must be found.
    """
    schedule = draw(built(max_pp=4, max_chunks=6))
    rows = [[action for _, action in schedule.actions(rank)] for rank in range(schedule.pp)]
    rank = draw(st.integers(0, schedule.pp - 1))
    index = draw(st.integers(0, len(rows[rank]) - 1))
    action = rows[rank][index]
    must: set[Fault] = set()
    how = draw(st.sampled_from(["drop", "double", "move", "give away"]))
    if how == "double":
        rows[rank].insert(draw(st.integers(0, len(rows[rank]))), action)
        must = {Fault.REPEATED}
    else:
        rows[rank].pop(index)
        if how == "drop":
            must = {Fault.MISSING, Fault.WEIGHTS_MISSING, Fault.BACKWARD_TWICE}
        elif how == "move":
            rows[rank].insert(draw(st.integers(0, len(rows[rank]))), action)
        else:
            other = (rank + 1) % schedule.pp
            rows[other].insert(draw(st.integers(0, len(rows[other]))), action)
            must = {Fault.WRONG_RANK} if schedule.pp > 1 else set()
    return Schedule(**{**vars(schedule), "rows": tuple(tuple(row) for row in rows)}), must


@settings(deadline=None, max_examples=150)
@given(broken())
def test_whatever_is_wrong_with_computations_is_found_and_lowering_takes_it(
    case: tuple[Schedule, set[Fault]],
) -> None:
    schedule, must = case
    lowered = lower(schedule)
    problems = check(lowered)
    found = {problem.fault for problem in problems}
    assert not must or found & must
    assert report(lowered, problems)
    if not problems:
        assert not must
        for channel in Channel:
            timeline, blocked = play(lowered, Costs(), channel)
            assert not blocked
            done_at = {span.action: span.end for span in timeline.spans}
            for span in timeline.spans:
                assert all(done_at.get(needed, 0) <= span.start for needed in needs(span.action))


def needs(action: Action) -> list[Action]:
    """What a computation needs, wherever and in whichever form it is computed;
    from the definition alone.
    """
    offsets = {
        Kind.F: [(Kind.F, -1)],
        Kind.B: [(Kind.F, 0), (Kind.B, 1), (Kind.I, 1)],
        Kind.I: [(Kind.F, 0), (Kind.B, 1), (Kind.I, 1)],
        Kind.W: [(Kind.I, 0)],
    }
    return [
        action._replace(kind=kind, stage=(action.stage or 0) + by)
        for kind, by in offsets.get(action.kind, [])
    ]
