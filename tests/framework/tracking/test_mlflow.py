"""MLflow for real, with its store of files: names, values, one run over two starts,
and failures that end no run.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright.config import RunConfig
from meshwright.tracking.mlflow import MlflowSink
from meshwright.tracking.observer import find_sinks
from meshwright.tracking.record import metrics
from meshwright.tracking.tracker import Tracker

pytest.importorskip("mlflow", reason="the extra mlflow is not installed")


def config() -> RunConfig:
    tracking = {"project": "p", "sinks": ("mlflow",)}
    return RunConfig.model_validate({"run": {"name": "n", "seed": 7}, "tracking": tracking})


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_the_name_gives_the_sink() -> None:
    assert find_sinks(config().tracking) == [MlflowSink]


def test_two_starts_are_one_run(tmp_path: Path, record) -> None:
    from mlflow.tracking import MlflowClient

    warnings: list[str] = []
    records = [record(step, extra={"ema/decay": 0.5}) for step in (1, 2, 3)]
    for part in (records[:2], records[2:]):
        with Tracker(
            None, [MlflowSink(config(), tmp_path)], warn=warnings.append, close_limit_s=60
        ) as tracker:
            for each in part:
                tracker.write(each)
    assert warnings == []
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (
        run.info.run_name == "n"
        and run.info.status == "FINISHED"
        and run.data.params["run.seed"] == "7"
    )
    for name in metrics(records[0]):
        history = {
            each.step: each.value for each in client.get_metric_history(run.info.run_id, name)
        }
        assert history == {each.step: float(metrics(each)[name]) for each in records}, name


def test_a_store_that_refuses_ends_the_sink_alone(tmp_path: Path, record) -> None:
    (tmp_path / "mlflow").write_text("no folder")
    warnings: list[str] = []
    with Tracker(None, [MlflowSink(config(), tmp_path)], warn=warnings.append) as tracker:
        tracker.write(record(1))
    assert len(warnings) == 1 and warnings[0].startswith(
        "MlflowSink is switched off after an error"
    ), warnings


def test_a_dead_server_delays_no_run(
    tmp_path: Path, record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    warnings: list[str] = []
    began_s = time.monotonic()
    with Tracker(
        None, [MlflowSink(config(), tmp_path)], warn=warnings.append, close_limit_s=1.0
    ) as tracker:
        for step in range(1, 2001):
            tracker.write(record(step))
    assert time.monotonic() - began_s < 30 and warnings
