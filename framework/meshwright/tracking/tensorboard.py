"""Sink for TensorBoard: event files in the run's directory,
written by torch's ``SummaryWriter``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig
from meshwright.tracking.record import StepRecord, metrics

WRITER_THREAD = "_AsyncWriterThread"
"""Class of the thread in which tensorboard writes events."""


class TensorBoardSink:
    """Sink with a scalar for each metric, under the names of ``metrics.jsonl``.
    A resumed run adds a file of events.

    A failed import of tensorboard ends this sink with a warning, and never the run.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._directory = directory / "tensorboard"
        self._writer: Any = None
        self._former_hook = threading.excepthook

    def open(self) -> None:
        """Import tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        self._open_writer = SummaryWriter
        self._former_hook = threading.excepthook
        threading.excepthook = self._on_thread_error

    def write(self, record: StepRecord) -> None:
        """Write the metrics of one step; the writer flushes every two minutes, and at the end.

        The first step hides the events of later steps that an earlier start has written
        (``purge_step``).
        """
        if self._writer is None:
            self._writer = self._open_writer(str(self._directory), purge_step=record.step)
        for name, value in metrics(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self, failed: bool = False) -> None:
        """Flush and close the file of events."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError:
            if not failed:  # else write has raised the same error
                raise
        finally:
            threading.excepthook = self._former_hook

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Drop the traceback of tensorboard's own thread, whose error (a full disk)
        the next write raises again.
        """
        if type(args.thread).__name__ != WRITER_THREAD:
            self._former_hook(args)
