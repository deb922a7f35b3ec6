"""Schedules as the user's code: the rows that a function returns, placed,
checked and drawn as ours are.
"""

from __future__ import annotations

import pytest

from examples.extend.own_schedule import breadth_first
from meshwright.schedule.action import Placement
from meshwright.schedule.analysis import Costs, bubble_share, timeline_of
from meshwright.schedule.build import build
from meshwright.schedule.load import draw_schedule, lowered_schedule
from meshwright.verify import layout_config, parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, Size, assert_agrees, model_config
from tests.support.errors import raises
from tests.support.marks import long_row

EXAMPLE = "examples.extend.own_schedule:breadth_first"
HERE = "tests.framework.schedule.test_own"
SIZE = Size(heads=2, sequence_length=4, num_blocks=2, global_batch=8)


def in_a_v(pp: int, chunks: int, num_stages: int) -> list[str]:
    rows = []
    for rank in range(pp):
        stages = (rank, num_stages - 1 - rank)
        forwards = [f"{stage}F{m}" for stage in stages for m in range(chunks)]
        halves = [
            f"{stage}{half}{m}"
            for stage in reversed(stages)
            for m in range(chunks)
            for half in "IW"
        ]
        rows.append(" ".join(forwards + halves))
    return rows


def loses_one(pp: int, chunks: int, num_stages: int) -> list[list[str]]:
    return [row[:-1] for row in breadth_first(pp, chunks, num_stages)]


def waits_for_ever(pp: int, chunks: int, num_stages: int) -> list[list[str]]:
    return [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]


def fails(pp: int, chunks: int, num_stages: int) -> list[str]:
    raise ValueError("only for even pp")


def no_action(pp: int, chunks: int, num_stages: int) -> list[str]:
    return ["0F0 0G0"] * pp


def test_the_example() -> None:
    schedule = build(EXAMPLE, 2, 2, 2)
    assert [" ".join(map(str, row)) for row in schedule.rows] == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]
    assert (schedule.name, schedule.num_stages, schedule.placement) == (EXAMPLE, 4, Placement.LOOP)
    assert bubble_share(timeline_of(lowered_schedule(EXAMPLE, 2, 4, 2), Costs())) == pytest.approx(
        1 / 9
    )


def test_a_v_is_recognised() -> None:
    schedule = build(f"{HERE}:in_a_v", 2, 2, 2)
    assert schedule.placement is Placement.V and schedule.splits_backward


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("loses_one", "MW-SCHEDULE-014", ("rank 0, position 3", "0B1")),
        ("waits_for_ever", "MW-SCHEDULE-014", ("0RECV_B0", "rank 1 is at position 1")),
        ("fails", "MW-SCHEDULE-017", ("test_own.py", "only for even pp")),
        ("no_action", "MW-SCHEDULE-005", ("line 2, word 2", "'0G0'")),
        ("missing", "MW-CONFIG-010", ("missing",)),
    ],
)
def test_refused_before_any_rank_starts(name: str, code: str, values: tuple[str, ...]) -> None:
    config = layout_config(model_config("gpt2", SIZE), parse_layout("pp2"), 2, "float64")
    pipeline = config.pipeline.model_copy(update={"schedule": f"{HERE}:{name}"})
    with raises(code, *values):
        draw_schedule(pipeline, 2, config.batch.chunks)


@pytest.mark.parametrize(
    "layout",
    [f"pp2,interleave2,{EXAMPLE}", long_row(f"dp2,pp2,tp2,interleave2,{HERE}:in_a_v,zero2")],
)
def test_the_numbers_of_one_process(layout: str, pool: RankPool) -> None:
    assert_agrees(model_config("gpt2", SIZE), layout, pool, References(), global_batch=8, steps=2)
