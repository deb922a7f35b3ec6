"""The loss curve: a real PNG, also of runs that went wrong."""

from __future__ import annotations

import math
import struct
import sys

import pytest

from meshwright.errors import DataError, UserError
from meshwright.tracking.jsonl import JsonlSink
from meshwright_plan.report.loss_curve import loss_curve, running_mean
from tests.support.errors import has_code


@pytest.fixture
def metrics_file(tmp_path):
    def make(records):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.open()
        for each in records:
            sink.write(each)
        sink.close()
        return sink.path

    return make


def size(png) -> tuple[int, ...]:
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_a_run_is_drawn(tmp_path, metrics_file, record) -> None:
    records = [
        record(step, validation_loss=3.0 if step % 50 == 0 else None) for step in range(1, 201)
    ]
    png = tmp_path / "pictures" / "loss.png"
    loss_curve(metrics_file(records), png, unigram_entropy=6.5)
    assert size(png) == (1200, 800)


@pytest.mark.parametrize("losses", [[2.0], [math.nan, math.inf], [2.0, math.nan, 1.0]])
def test_short_and_diverged_runs_are_drawn(tmp_path, metrics_file, record, losses) -> None:
    records = [
        record(step, loss=loss, validation_loss=loss) for step, loss in enumerate(losses, start=1)
    ]
    loss_curve(metrics_file(records), tmp_path / "loss.png")
    assert size(tmp_path / "loss.png") == (1200, 800)


def test_no_records_is_a_clear_error(tmp_path, metrics_file) -> None:
    with pytest.raises(DataError, match="no records yet", check=has_code("MW-TRACKING-005")):
        loss_curve(metrics_file([]), tmp_path / "loss.png")


def test_a_missing_matplotlib_is_a_clear_error(tmp_path, metrics_file, record, monkeypatch) -> None:
    # what Python itself does to forbid an import
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib", check=has_code("MW-PICTURE-001")):
        loss_curve(metrics_file([record(1)]), tmp_path / "loss.png")


def test_running_mean() -> None:
    assert running_mean([1.0, 2.0, 6.0, math.nan, 5.0], 1) == [1.0, 3.0, 4.0, 5.5, 5.0]
    falling = [float(value) for value in range(9, 0, -1)]
    assert running_mean(falling, 3) == falling  # it does not lag
    assert math.isnan(running_mean([math.nan], 2)[0])
