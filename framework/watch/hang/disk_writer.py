"""Files of the watchdog in the run's directory. Each write has a time limit, because the file system may hang too.

status.json        rank 0, every tick: all heartbeats
hang/rank-N.txt    each rank: the stacks of its threads, the first unfinished collective of each group
hang/report.txt    the reporting rank: why the run hangs
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.system.atomic import write_atomic
from meshwright.watch.hang.flight_recorder import unfinished
from meshwright.watch.hang.status import Status

IO_S = 5.0
"""Seconds to wait for a write; a slower one continues in its own thread."""


class DiskWriter:
    """Writer of one rank's watchdog files. Errors of a write are passed to ``warn``."""

    def __init__(self, status_file: Path, rank: int, host: str, warn: Callable[[Exception], None]) -> None:
        """Prepare the writer. ``warn`` is called with each error of a write."""
        self._status_file = status_file
        self._directory = status_file.parent / "hang"
        self._rank = rank
        self._host = host
        self._warn = warn
        self._writing: threading.Thread | None = None
        self.unfinished: list[str] = []
        """First unfinished collective of each group of this rank, at the last :meth:`write_stacks`."""

    @property
    def report_path(self) -> Path:
        return self._directory / "report.txt"

    @property
    def _stacks_path(self) -> Path:
        return self._directory / f"rank-{self._rank}.txt"

    def remove_stacks(self) -> None:
        """Remove this rank's stacks of an earlier hang, so that the file shows the latest hang alone."""
        self._within_limit(lambda: self._stacks_path.unlink(missing_ok=True))

    def write_stacks(self) -> None:
        """Write the stacks of all threads of this process, and set :attr:`unfinished`."""

        def write() -> None:
            self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks_path.open("w") as file:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                print(f"rank {self._rank}, process {os.getpid()} on {self._host}, {now}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
                self.unfinished = unfinished()
                print("\nunfinished collectives:", *(self.unfinished or ["none recorded"]), sep="\n", file=file)

        self._within_limit(write)

    def write_report(self, lines: Sequence[str]) -> None:
        def write() -> None:
            self.report_path.parent.mkdir(parents=True, exist_ok=True)
            self.report_path.write_text("\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), *lines, ""]))

        self._within_limit(write)

    def write_status(self, status: Status) -> None:
        """Write ``status.json`` atomically."""
        text = status.model_dump_json() + "\n"
        self._within_limit(lambda: write_atomic(self._status_file, text, is_durable=False))

    def _within_limit(self, write: Callable[[], object]) -> None:
        """Write in a thread and wait at most ``IO_S``; skip the write while an earlier one still hangs."""

        def attempt() -> None:
            try:
                write()
            except OSError as error:
                self._warn(error)

        if self._writing is None or not self._writing.is_alive():
            self._writing = threading.Thread(target=attempt, name="watchdog-disk", daemon=True)
            self._writing.start()
            self._writing.join(IO_S)
