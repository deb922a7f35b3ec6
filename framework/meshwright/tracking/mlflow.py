"""Sink for MLflow: a run in the server of ``MLFLOW_TRACKING_URI``,
or in files in the run's directory.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import read_text
from meshwright.tracking.names import MAX_ID_BYTES, project_name
from meshwright.tracking.record import StepRecord, metrics

RUN_ID = "mlflow_run_id"
"""File in the run's directory with the id of its MLflow run,
under which a resumed run continues.
"""


class MlflowSink:
    """Sink with a metric for each number, under the names of ``metrics.jsonl``.
    The project is MLflow's experiment.

    A failed import of mlflow, or a server that refuses, ends this sink with a warning, and never
    the run.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._client: Any = None
        self._run_id = ""

    def open(self) -> None:
        """Import mlflow; continue the run of an earlier start,
        or create one with the configuration as parameters.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (self._directory / "mlflow").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        path = self._directory / RUN_ID
        # the store may be another one than before
        with contextlib.suppress(FileNotFoundError, MlflowException):
            run_id = read_text(path, MAX_ID_BYTES).strip()
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return
        name = project_name(self._config.tracking, "MLFLOW_EXPERIMENT_NAME", os.environ)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run_id = self._client.create_run(
            experiment, run_name=self._config.run.name
        ).info.run_id
        write_atomic(path, self._run_id + "\n", is_durable=False)
        for section, keys in self._config.model_dump(mode="json").items():
            for key, value in keys.items():
                self._client.log_param(self._run_id, f"{section}.{key}", str(value)[:500])

    def write(self, record: StepRecord) -> None:
        """Write the metrics of one step. Blocks until the store has them."""
        now_ms = time.time_ns() // 1_000_000
        rows = [
            self._metric(name, float(value), now_ms, record.step)
            for name, value in metrics(record).items()
        ]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self, failed: bool = False) -> None:
        """Mark the run as finished or failed."""
        if self._run_id:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
