"""The words of a schedule and their text form."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.action import Action, Kind, Placement, Schedule, actions_of
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.load import format_schedule, parse_schedule, read_schedule, schedule_digest
from meshwright.schedule.lower import lower
from meshwright.schedule.text import format_item
from tests.framework.schedule.sizes import built
from tests.support.errors import raises

HEADER = "# hand pp=1 num_stages=1 chunks=1 placement=loop\n"


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(["torch", "numpy"]))  # whoever imports them fails
from meshwright.schedule import build, degrees, load, lower
from meshwright.schedule.analysis import Costs, check, simulate
from meshwright.schedule.drawing import text
from meshwright.schedule.load import format_schedule, parse_schedule
for name in build.BUILDERS:
    built = build.build(name, 2, 3, degrees.INTERLEAVES.get(name, [1])[0])
    lowered = lower.lower(parse_schedule(format_schedule(built)))
    assert check(lowered) == []
    print(text(simulate(lowered, Costs())))
"""


def test_the_room_needs_no_torch() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], check=True, capture_output=True, text=True
    )
    assert run.stdout.count("rank 1 | ") == len(BUILDERS)


@settings(deadline=None)
@given(built(), st.booleans())
def test_text_round_trip(schedule: Schedule, lowered: bool) -> None:
    assert not schedule.is_lowered
    schedule = lower(schedule) if lowered else schedule
    assert schedule.is_lowered is lowered
    again = parse_schedule(format_schedule(schedule))
    assert again == schedule
    assert schedule_digest(again) == schedule_digest(schedule)


def test_text_of_actions() -> None:
    group = (Action(Kind.SEND_F, 0, 1), Action(Kind.RECV_B, 0, 0))
    assert format_item(Action(Kind.F, 2, 10)) == "2F10"
    assert format_item(group) == "{0SEND_F1+0RECV_B0}"
    assert str(Action(Kind.REDUCE, 3)) == "3REDUCE"
    assert str(Action(Kind.STEP)) == "STEP"
    row = parse_schedule(HEADER + "0I0 0W12 {0SEND_F1+0RECV_B0} 0REDUCE STEP").rows[0]
    assert row == (
        Action(Kind.I, 0, 0),
        Action(Kind.W, 0, 12),
        group,
        Action(Kind.REDUCE, 0),
        Action(Kind.STEP),
    )
    assert [len(actions_of(item)) for item in row] == [1, 1, 2, 1, 1]


MANY_DIGITS = "0" * 5000
"""More than int() reads."""


@pytest.mark.parametrize(
    "word",
    [
        "0X0",
        "F0",
        "0F",
        "0F0x",
        "0REDUCE1",
        "0STEP",
        "{0SEND_F0",
        "{0F0}",
        "{}",
        "0F-1",
        "0F" + MANY_DIGITS,
    ],
)
def test_an_unreadable_word_is_named_with_its_line(word: str) -> None:
    with raises(("MW-SCHEDULE-004", "MW-SCHEDULE-005"), "line 2", word.strip("{}")):
        parse_schedule(HEADER + f"0F0 {word} STEP")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0F0 0B0\n",
        "# only a comment\n",
        "# a pp=2 num_stages=2 chunks=1 placement=loop\n0F0\n",
        "# a pp=0 num_stages=0 chunks=1 placement=loop\n",
        "# a pp=1 num_stages=1 chunks=0 placement=loop\n0F0\n",
        "# a pp=2 num_stages=3 chunks=1 placement=loop\n0F0\n1F0\n",
        "# a pp=2 num_stages=0 chunks=1 placement=loop\n0F0\n1F0\n",
        "# a pp=1 num_stages=1 chunks=1 placement=spiral\n0F0\n",
        f"# a pp=1{MANY_DIGITS} num_stages=1 chunks=1 placement=loop\n0F0 0B0\n",
        "# a pp=\uff11 num_stages=1 chunks=1 placement=loop\n0F0 0B0\n",  # a full-width digit
        "# a pp=1 num_stages=2000000 chunks=1 placement=loop\n0F0 0B0\n",
    ],
)
def test_an_unreadable_header_is_an_error(text: str) -> None:
    with raises(("MW-SCHEDULE-002", "MW-SCHEDULE-003"), "line 1"):
        parse_schedule(text)


def test_comments_and_blank_lines_may_stand_anywhere() -> None:
    commented = "# by hand\n\n" + HEADER + "#pp=1 is easy\n\n  0F0 0B0\t\n# the end\n"
    assert parse_schedule(commented) == parse_schedule(HEADER + "0F0 0B0")
    with raises("MW-SCHEDULE-005", "line 4, word 2: '0Q0'"):
        parse_schedule("# by hand\n" + HEADER + "# more\n0F0 0Q0")
    with raises("MW-SCHEDULE-005", "line 2, word 1"):
        parse_schedule(HEADER + "0F\u0660 0B0")
    with raises("MW-SCHEDULE-002", "line 3"):
        parse_schedule(HEADER + "0F0\n" + HEADER)
    with raises("MW-SCHEDULE-002", "line 2"):
        parse_schedule("0F0\n" + HEADER)


def test_a_file_is_named_with_line_and_word(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# my own\n" + format_schedule(build("zb_v", 2, 3, 2)))
    assert read_schedule(path) == build("zb_v", 2, 3, 2)
    path.write_text(HEADER + "0F0 {0SEND_F0 0B0")
    with raises("MW-SCHEDULE-004") as caught:
        read_schedule(path)
    assert str(caught.value).startswith(f"{path}, line 2, word 2: '{{0SEND_F0': a group is written")
    path.write_bytes(b"# caf\xe9")
    with raises("MW-SCHEDULE-001", "mine.txt"):
        read_schedule(path)
    with raises("MW-SCHEDULE-001", "other.txt"):
        read_schedule(tmp_path / "other.txt")


def test_only_communications_are_posted_together() -> None:
    schedule = build("1f1b", 1, 1)
    with pytest.raises(AssertionError, match="posted together"):
        replace(schedule, rows=((schedule.rows[0][0], (Action(Kind.B, 0, 0),)),))


def test_digest_sees_every_difference() -> None:
    schedule = build("1f1b", 2, 3)
    others = [
        lower(schedule),
        build("gpipe", 2, 3),
        build("1f1b", 2, 2),
        replace(schedule, rows=schedule.rows[::-1]),
        replace(schedule, name="x"),
    ]
    assert len({schedule_digest(each) for each in [schedule, *others]}) == 1 + len(others)
    assert schedule_digest(schedule) == schedule_digest(build("1f1b", 2, 3))


def test_both_ends_of_a_message() -> None:
    """``0SEND_F5`` -> ``1RECV_F5``; ``1SEND_B5`` -> ``0RECV_B5``; and back."""
    schedule = build("1f1b", 2, 6)
    for sent, received, source, destination in [
        (Action(Kind.SEND_F, 0, 5), Action(Kind.RECV_F, 1, 5), 0, 1),
        (Action(Kind.SEND_B, 1, 5), Action(Kind.RECV_B, 0, 5), 1, 0),
    ]:
        assert (sent.partner(), received.partner()) == (received, sent)
        assert (schedule.peer(sent), schedule.peer(received)) == (destination, source)


def test_loop_placement() -> None:
    schedule = parse_schedule(
        "# hand pp=2 num_stages=4 chunks=1 placement=loop\n0F0 2F0\n1F0 3F0\n"
    )
    assert [schedule.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert [schedule.stages_of(pp_rank) for pp_rank in range(2)] == [(0, 2), (1, 3)]
    assert schedule.peer(Action(Kind.SEND_F, 1, 0)) == 0  # stage 2 is on rank 0 again
    assert schedule.interleave == 2


def test_v_placement() -> None:
    """Down the ranks and back up: the last rank holds the turn, where nothing is sent."""
    schedule = build("zb_v", 3, 1, 2)
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [schedule.stages_of(pp_rank) for pp_rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert (
        schedule.send_after(Action(Kind.F, 2, 0))
        is schedule.receive_for(Action(Kind.F, 3, 0))
        is None
    )
    assert (
        schedule.send_after(Action(Kind.I, 3, 0))
        is schedule.receive_for(Action(Kind.I, 2, 0))
        is None
    )
    assert schedule.receive_for(Action(Kind.I, 1, 0)) == Action(Kind.RECV_B, 1, 0)
    # the forward of the way up goes to the rank before
    assert schedule.peer(Action(Kind.SEND_F, 3, 0)) == 1
    assert schedule.peer(Action(Kind.SEND_B, 4, 0)) == 2  # and its backward to the rank behind
    assert [Placement.V.pp_rank(stage, 2) for stage in range(6)] == [0, 1, 1, 0, 0, 1]


def test_last_backwards() -> None:
    assert build("1f1b", 4, 6).last_backwards(1) == {Action(Kind.B, 1, 5)}
    assert build("zb_h1", 4, 6).last_backwards(1) == {Action(Kind.W, 1, 5)}
    assert build("zb_v", 2, 6, 2).last_backwards(1) == {Action(Kind.W, 1, 5), Action(Kind.W, 2, 5)}
    text = (
        "# split pp=1 num_stages=2 chunks=2 placement=loop\n0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 0W1"
        " 1W1 0W0 STEP"
    )
    assert parse_schedule(text).last_backwards(0) == {Action(Kind.W, 1, 1), Action(Kind.W, 0, 0)}
