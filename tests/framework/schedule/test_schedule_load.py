"""The schedule that a configuration runs: by its name, or from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from meshwright.config import Pipeline, RunConfig
from meshwright.errors import UserError
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.load import draw_schedule, format_schedule
from meshwright.schedule.lower import lower
from meshwright.verify.layouts import SCHEDULES


def config(**pipeline: Any) -> RunConfig:
    """Two pipeline ranks, four micro-batches."""
    tree = {"data": {"train": "corpus"}, "parallel": {"pp": 2, "dp": 1}, "batch": {"chunks": 4}, "pipeline": pipeline}
    return RunConfig.model_validate(tree)


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
    assert draw_schedule(config(**pipeline)) == lower(build(*built))


def test_a_file_is_lowered_unless_it_is(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    compute = build("zb_h1", 2, 4)
    for schedule in (compute, lower(compute)):
        path.write_text(format_schedule(schedule))
        assert draw_schedule(config(schedule_file=str(path))) == lower(compute)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"\xff", "cannot be read (not UTF-8 text)"),
        (b"0F0 0B0", "own.txt, line 1"),
        (format_schedule(build("1f1b", 2, 3)).encode(), "is for pp=2 and chunks=3, but parallel.pp = 2"),
        (format_schedule(build("1f1b", 2, 4)).replace("0B3", "0B2").encode(), "0B3"),
        (format_schedule(build("1f1b", 2, 4)).replace("0B3", "0B2").encode(), "own.txt, with its messages placed: "),
    ],
)
def test_a_file_that_cannot_be_is_explained(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        draw_schedule(config(schedule_file=str(path)))
    assert said in str(raised.value)


def test_the_schedules_have_the_same_names_everywhere() -> None:
    """What can be built, what the configuration takes, and what verify knows as words of a layout."""
    configured = get_args(get_args(Pipeline.model_fields["schedule"].annotation)[0])
    assert set(configured) == set(BUILDERS) == set(SCHEDULES)
    for name in configured:
        pipeline = Pipeline(schedule=name)
        assert build(name, 2, 4, pipeline.stages_per_rank).interleave == pipeline.stages_per_rank
