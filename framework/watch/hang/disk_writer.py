"""What the watchdog leaves in the run's directory, whose file system may be what hangs: no write is waited for long.

status.json        rank 0, every tick: all heartbeats
hang/rank-N.txt    each rank: the stacks of its threads
hang/report.txt    who tells why the run hangs
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.watch.hang.heartbeat import STATUS, Status

IO_S = 5.0
"""How long a write may take before it is left to itself."""


class DiskWriter:
    """The files of one rank. What cannot be written is told to ``warn``."""

    def __init__(self, directory: Path, rank: int, host: str, warn: Callable[[Exception], None]) -> None:
        """``directory``: of the run."""
        self._directory = directory
        self._rank = rank
        self._host = host
        self._warn = warn
        self._writing: threading.Thread | None = None

    @property
    def report_place(self) -> Path:
        return self._directory / "hang" / "report.txt"

    @property
    def _stacks_place(self) -> Path:
        return self._directory / "hang" / f"rank-{self._rank}.txt"

    def forget_stacks(self) -> None:
        """Those of an earlier hang: the next one's are to stand alone."""
        self._at_most(lambda: self._stacks_place.unlink(missing_ok=True))

    def write_stacks(self) -> None:
        """Of all threads of this process."""

        def write() -> None:
            self._stacks_place.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks_place.open("w") as file:
                told = time.strftime("%Y-%m-%d %H:%M:%S")
                print(f"rank {self._rank}, process {os.getpid()} on {self._host}, {told}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

        self._at_most(write)

    def write_report(self, lines: Sequence[str]) -> None:
        def write() -> None:
            self.report_place.parent.mkdir(parents=True, exist_ok=True)
            self.report_place.write_text("\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), *lines, ""]))

        self._at_most(write)

    def write_status(self, status: Status) -> None:
        """Whole or not at all."""

        def write() -> None:
            aside = self._directory / f"{STATUS}.part"
            aside.write_text(status.model_dump_json() + "\n")
            aside.replace(self._directory / STATUS)

        self._at_most(write)

    def _at_most(self, write: Callable[[], object]) -> None:
        """Write, and wait no longer than IO_S; not at all while what came before still hangs."""

        def attempt() -> None:
            try:
                write()
            except OSError as error:
                self._warn(error)

        if self._writing is None or not self._writing.is_alive():
            self._writing = threading.Thread(target=attempt, name="watchdog-disk", daemon=True)
            self._writing.start()
            self._writing.join(IO_S)
