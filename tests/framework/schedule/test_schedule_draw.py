"""The grid on the terminal."""

from __future__ import annotations

import pytest

from meshwright.schedule.analysis import Costs, simulate, timeline_of
from meshwright.schedule.build import build
from meshwright.schedule.drawing import text
from meshwright.schedule.load import parse_schedule
from meshwright.schedule.lower import lower
from tests.support.marks import marked_rows


def test_a_lowered_schedule_is_drawn_like_the_built_one() -> None:
    assert text(lower(build("1f1b", 4, 8))) == text(build("1f1b", 4, 8))


def test_time_in_columns() -> None:
    """B is twice as long as F, a message takes half of F; REDUCE and STEP stand at the end."""
    drawn = text(simulate(lower(build("1f1b", 2, 2)), Costs(f=2, b=4, comm=1, reduce=2, step=2)))
    assert drawn.split("\n") == [
        "1f1b: bubble 40.0 % of total time; activations in flight 2 1",
        "rank 0 | F0 F1 .  .  .  B0--- .  B1--- R  S",
        "rank 1 | .  . F0 B0--- F1 B1--- R  S   .  .",
    ]


def test_stages_are_named_where_a_rank_has_several() -> None:
    schedule = parse_schedule(
        "# hand pp=2 num_stages=4 chunks=1 placement=loop\n0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n"
    )
    assert text(schedule).split("\n")[1:] == [
        "rank 0 | 0F0 .   2F0 .   .   2B0 .   0B0",
        "rank 1 | .   1F0 .   3F0 3B0 .   1B0 .",
    ]


def test_a_computation_of_next_to_nothing_does_not_blow_up_the_rest() -> None:
    drawn = text(simulate(lower(build("zb_h1", 2, 2)), Costs(f=0.3, i=0.3, w=1e-6)), 120)
    assert "…" not in drawn and "F0--------- F1" in drawn and len(drawn) < 500


def test_a_cost_that_dwarfs_all_others_is_drawn_too() -> None:
    drawn = text(simulate(lower(build("1f1b", 2, 4)), Costs(comm=1e9)), 100)
    assert max(map(len, drawn.splitlines())) <= 100


@marked_rows("long", "gpipe-130-20", "1f1b-130-20")
@pytest.mark.parametrize("pp", [1, 2, 3, 8, 9, 20])
@pytest.mark.parametrize("chunks", [1, 7, 130])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_no_line_is_too_long_and_both_ends_are_seen(name: str, pp: int, chunks: int) -> None:
    lowered = lower(build(name, pp, chunks))
    timelines = timeline_of(lowered), simulate(lowered, Costs(f=0.013, b=0.031, comm=0.002))
    for width in (100, 60):
        drawings = [text(timeline, width) for timeline in timelines]
        for drawn in drawings:
            lines = drawn.split("\n")
            assert max(len(line) for line in lines) <= width
            assert len(lines) <= 1 + 17
            assert " | F0" in lines[1]
        assert drawings[0].split("\n")[1].endswith(f"B{chunks - 1}")
        if pp <= 8:
            needed = len("rank 0 | ") + 2 * (chunks + pp - 1) * len(f"F{chunks - 1} ") - 1
            assert ("…" in drawings[0].split("\n")[1]) == (needed > width)
