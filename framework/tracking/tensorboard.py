"""Sink for TensorBoard: event files in the run's directory, written by torch's ``SummaryWriter``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config import RunConfig
from meshwright.tracking.record import StepRecord, metrics


class TensorBoardSink:
    """Sink with a scalar for each metric, under the names of ``metrics.jsonl``. A resumed run adds a file of events.

    A failed import of tensorboard ends this sink with a warning, and never the run.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._directory = directory / "tensorboard"
        self._writer: Any = None

    def open(self) -> None:
        """Import tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        self._open_writer = SummaryWriter

    def write(self, record: StepRecord) -> None:
        """Write the metrics of one step; the writer flushes every two minutes, and at the end.

        The first step hides the events of later steps that an earlier start has written (``purge_step``).
        """
        if self._writer is None:
            self._writer = self._open_writer(str(self._directory), purge_step=record.step)
        for name, value in metrics(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self, failed: bool = False) -> None:
        """Flush and close the file of events."""
        if self._writer is not None:
            self._writer.close()
