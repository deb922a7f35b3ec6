"""The schedule that a configuration runs: by its name, or from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from meshwright.config import Pipeline
from meshwright.config.combinations.layout import SCHEDULES
from meshwright.schedule.action import Schedule
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.load import draw_schedule, format_schedule
from meshwright.schedule.lower import lower
from tests.support.errors import raises


def drawn(**pipeline: Any) -> Schedule:
    """Return the schedule of two pipeline ranks and four micro-batches."""
    return draw_schedule(Pipeline(**pipeline), 2, 4)


@pytest.mark.parametrize(
    ("pipeline", "built"),
    [
        ({}, ("1f1b", 2, 4, 1)),
        ({"schedule": "gpipe"}, ("gpipe", 2, 4, 1)),
        ({"schedule": "zb_v"}, ("zb_v", 2, 4, 2)),
        ({"schedule": "interleaved_1f1b"}, ("interleaved_1f1b", 2, 4, 2)),
        ({"schedule": "interleaved_1f1b", "interleave": 3}, ("interleaved_1f1b", 2, 4, 3)),
    ],
)
def test_by_name(pipeline: dict[str, Any], built: tuple[str, int, int, int]) -> None:
    assert drawn(**pipeline) == lower(build(*built))


def test_a_file_is_lowered_unless_it_is(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    compute = build("zb_h1", 2, 4)
    for schedule in (compute, lower(compute)):
        path.write_text(format_schedule(schedule))
        assert drawn(schedule_file=str(path)) == lower(compute)


WRONG = format_schedule(build("1f1b", 2, 4)).replace("0B3", "0B2").encode()


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        (None, "MW-SCHEDULE-001", ("own.txt",)),
        (b"\xff", "MW-SCHEDULE-001", ("own.txt",)),
        (b"0F0 0B0", "MW-SCHEDULE-002", ("own.txt, line 1",)),
        (
            format_schedule(build("1f1b", 2, 3)).encode(),
            *("MW-SCHEDULE-015", ("pp=2", "chunks=3", "parallel.pp = 2")),
        ),
        (WRONG, "MW-SCHEDULE-014", ("own.txt", "0B3")),
    ],
)
def test_a_file_that_cannot_be_is_explained(
    content: bytes | None, code: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    with raises(code, *values):
        drawn(schedule_file=str(path))


def test_the_schedules_have_the_same_names_everywhere() -> None:
    """What can be built, what the configuration takes,
    and what verify knows as words of a layout.
    """
    configured = get_args(get_args(Pipeline.model_fields["schedule"].annotation)[0])
    assert set(configured) == set(BUILDERS) == set(SCHEDULES)
    for name in configured:
        pipeline = Pipeline(schedule=name)
        assert build(name, 2, 4, pipeline.stages_per_rank).interleave == pipeline.stages_per_rank
