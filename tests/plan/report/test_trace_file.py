"""The file of a trace: what was written is read, what is damaged is explained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DataError
from meshwright.schedule.analysis import Costs, Reading, simulate
from meshwright.schedule.build import build
from meshwright.schedule.load import format_schedule
from meshwright.schedule.lower import lower
from meshwright.watch.trace import Trace, write
from meshwright_plan.report.trace_file import newest, read
from tests.support.errors import has_code, raises

SCHEDULE = lower(build("1f1b", 2, 2))
TIMELINE = simulate(SCHEDULE, Costs(comm=0.25, step=1))


def trace(**changes: Any) -> Trace:
    """Return a small one."""
    whole: dict[str, Any] = {
        "run": "run",
        "step": 5,
        "torch": "2.13.0",
        "device": "cpu",
        "hosts": ("a", "a"),
        "clock_error_s": 0.0,
        "schedule": format_schedule(SCHEDULE),
        "spans": tuple((s.rank, str(s.action), s.start, s.end) for s in TIMELINE.spans),
        "data": ((0, 0.0, 0.5),),
    }
    return Trace(**(whole | changes))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "step-00000005.json"
    write(trace(), path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    found = read(path)
    assert found.trace == trace() and found.schedule == SCHEDULE
    assert found.timeline.spans == TIMELINE.spans and found.timeline.name == "1f1b pp=2 chunks=2"
    assert found.readings == (Reading(0, 0.0, 0.5),)


def spans_but(*left_out: str) -> list[Any]:
    return [each for each in trace().spans if each[1] not in left_out]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "another"}, "format: Input should be 'meshwright trace 1'"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"step": "five"}, "step: Input should be a valid integer"),
        ({"schedule": "# what"}, "schedule: line 1"),
        ({"spans": spans_but("0F0")}, "0F0 of rank 0 is missing"),
        ({"spans": [*spans_but(), [0, "0F9", 1.0, 2.0]]}, "its schedule has no 0F9 on rank 0"),
        ({"spans": [*spans_but(), [1, "0F0", 1.0, 2.0]]}, "its schedule has no 0F0 on rank 1"),
        ({"spans": [*spans_but(), [0, "0F0", 1.0, 2.0]]}, "spans of"),
        ({"spans": [*spans_but("0F0"), [0, "0F0", 2.0, 1.0]]}, "ends before it starts"),
        ({"data": [[2, 0.0, 1.0]]}, "its data spans"),
        ({"hosts": ["a"]}, "1 hosts of 2 pipeline ranks"),
        ({"step": 10**400}, "step"),
        (
            {"spans": [[rank, name, 0.0, 0.0] for rank, name, *_ in trace().spans]},
            "no computation in it takes any time",
        ),
        (
            {"spans": [[rank, name, 0.0, 5e-324] for rank, name, *_ in trace().spans]},
            "takes any time",
        ),
        (
            {"spans": [[rank, name, -1e308, 1e308] for rank, name, *_ in trace().spans]},
            "no step takes more than",
        ),
        ({"data": [[0, 0.0, 1e308]]}, "it has a time of 1e+308 s"),
        ({"clock_error_s": 1e308}, "it has a time of 1e+308 s"),
    ],
)
def test_what_makes_no_sense_is_explained(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "step-00000005.json"
    path.write_text(json.dumps(json.loads(trace().model_dump_json()) | changes))
    with pytest.raises(DataError, check=has_code("MW-WATCH-011", "MW-WATCH-012")) as raised:
        read(path)
    assert said in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\x00", b'{"format": "meshwright trace 1"}']
)
def test_what_is_no_trace_is_explained(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step-00000005.json"
    path.write_bytes(content)
    with raises("MW-WATCH-011"):
        read(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with raises("MW-WATCH-010"):
        read(tmp_path / "nowhere.json")


def test_the_newest_trace_is_the_one_written_last(tmp_path: Path) -> None:
    with raises("MW-WATCH-009"):
        newest(tmp_path)
    traces = tmp_path / "traces"
    for index, name in enumerate(
        ("step-00000009.json", "step-00000005.json", "step-00000005.trace.json")
    ):
        write(trace(), traces / name)
        os.utime(traces / name, (index, index))
    assert newest(tmp_path).name == "step-00000005.json"
