"""Run files with finite but extreme values: a page, a picture or one message, and no overflow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright_launch.cli import main
from meshwright_plan.page.points import drawable
from tests.plan.report.builders import make_run

VALUES: list[Any] = [1e308, -1e308, 1e-320, 0, "NaN", "-Infinity", "1e308", 10**18]
KEYS = (
    "train/loss",
    "train/lr",
    "perf/step_s",
    "perf/tokens_per_sec",
    "validation/loss",
    "memory/peak_gib",
    "mine/x",
)
COUNTS = [
    ("step", 2**62),
    ("step", -5),
    ("train/tokens", 2**62),
    ("perf/devices", 2**62),
    ("train/restarts", 2**62),
]


def told(capsys: pytest.CaptureFixture[str], *words: object) -> int:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    assert code in (0, 2) and "Traceback" not in said.err and len(said.err) < 3000, said.err[:3000]
    return code


def rewrite(path: Path, key: str, values: list[Any]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line[key] = values[number % len(values)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("key", KEYS)
def test_extreme_numbers_of_steps(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, values in enumerate([VALUES, VALUES[:2], VALUES[:1], VALUES[2:3]]):
        run = make_run(tmp_path / f"run{number}", 8, traced=False)
        rewrite(run / "metrics.jsonl", key, values)
        assert told(capsys, "report", run) == 0
        told(capsys, "status", run)
        if number == 1:
            told(capsys, "plot", run)


@pytest.mark.parametrize(("key", "value"), COUNTS)
def test_extreme_counts(
    key: str, value: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", 3, traced=False)
    rewrite(run / "metrics.jsonl", key, [value])
    assert told(capsys, "report", run) == 0
    told(capsys, "status", run)


@pytest.mark.parametrize(
    "times",
    [
        (0.0, 0.0),
        (0.0, 1e308),
        (-1e308, 1e308),
        (0.0, 5e-324),
        (0.0, 1e-12),
        (0.0, 1e6),
        (1e6, 1e6 + 1e-9),
    ],
)
def test_extreme_times_of_a_trace(
    times: tuple[float, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All spans, and then the first alone, beside others of usual length."""
    for only_first in (False, True):
        run = make_run(tmp_path / f"run{only_first}", 5)
        (path,) = (run / "traces").glob("step-*.json")
        trace = json.loads(path.read_text())
        for number, span in enumerate(trace["spans"]):
            span[2:] = times if number == 0 or not only_first else span[2:]
        path.write_text(json.dumps(trace))
        told(capsys, "draw", run, "--format", "text,trace")
        assert told(capsys, "report", run) == 0


def test_what_a_chart_can_draw() -> None:
    assert drawable(1e-320) == 0.0 and drawable(1.5) == 1.5 and drawable(-1e99) == -1e99
    assert all(math.isnan(drawable(value)) for value in (1e308, -1e101, math.nan, math.inf))


def test_a_schedule_of_many_forwards_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resolved.json of some hundred bytes can ask for 2^18 forwards,
    which take minutes to simulate.
    """
    for chunks, is_drawn in ((8, True), (4000, False)):
        run = make_run(tmp_path / f"run{chunks}", 3, traced=False)
        path = run / "resolved.json"
        config = json.loads(path.read_text())
        config["parallel"]["pp"] = 64
        config["batch"] |= {"chunks": chunks, "global_batch": None}
        config["launch"]["processes"] = 256
        path.write_text(json.dumps(config))
        assert told(capsys, "report", run) == 0
        assert ("simulated, in ticks" in (run / "report.html").read_text()) == is_drawn
