"""Files of the watchdog in the run's directory, written by a thread of their own:
the file system may hang too.

status.json              rank 0, every tick: all heartbeats
hang/rank-N.txt          each rank: the stacks of its threads, the first unfinished collective of each group
hang/report.txt          the reporting rank: why the run hangs
hang/report-rank-N.txt   a rank that reports alone, without the store, after another rank has written report.txt

NOTE [heartbeats do not wait for files]: a rank that sends none for three ticks counts as silent,
and would be blamed for a hang while it writes to a slow file system. Writes are queued, and waited
for only before the process ends.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from meshwright.system.bounded import open_regular
from meshwright.watch.hang.flight_recorder import unfinished
from meshwright.watch.hang.status import Status

IO_S = 5.0
"""Seconds for which :meth:`DiskWriter.flush` waits for the queued writes."""


class DiskWriter:
    """Writer of one rank's watchdog files. Errors of a write are passed to ``warn``."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        host: str,
        warn: Callable[[Exception], None],
        replace_status: Callable[[str], object],
    ) -> None:
        """Prepare the writer.

        Args:
            directory: the run's directory.
            rank: this rank.
            host: name of this host.
            warn: called with each error of a write.
            replace_status: replaces the text of ``status.json`` atomically.
        """
        self._replace_status = replace_status
        self._directory = directory / "hang"
        self._rank = rank
        self._host = host
        self._warn = warn
        self._queue: dict[str, Callable[[], object]] = {}
        """Writes to do, by name; a new one replaces one of the same name."""
        self._changed = threading.Condition()
        self._is_writing = False
        self._earlier_report: os.stat_result | None = None
        """The report of an earlier hang, found at the start."""
        self.unfinished: list[str] = []
        """First unfinished collective of each group of this rank,
        at the last :meth:`write_stacks`.
        """

    @property
    def report_path(self) -> Path:
        return self._directory / "report.txt"

    @property
    def _alone_path(self) -> Path:
        return self._directory / f"report-rank-{self._rank}.txt"

    @property
    def _stacks_path(self) -> Path:
        return self._directory / f"rank-{self._rank}.txt"

    def remove_stacks(self) -> None:
        """Remove this rank's stacks of an earlier hang,
        so that the file shows the latest hang alone.
        """

        def remove() -> None:
            self._earlier_report = self._stat_report()
            self._alone_path.unlink(missing_ok=True)
            self._stacks_path.unlink(missing_ok=True)

        self._put("remove", remove)

    def write_stacks(self) -> None:
        """Write the stacks of all threads of this process, and set :attr:`unfinished`."""

        def write() -> None:
            self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks_path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                print(
                    f"rank {self._rank}, process {os.getpid()} on {self._host}, {now}",
                    file=file,
                    flush=True,
                )
                faulthandler.dump_traceback(file, all_threads=True)
                self.unfinished = unfinished()
                print(
                    "\nunfinished collectives:",
                    *(self.unfinished or ["none recorded"]),
                    sep="\n",
                    file=file,
                )

        self._put("stacks", write)

    def write_report(self, lines: Sequence[str], *, is_alone: bool = False) -> None:
        """Write the report. One made alone keeps another rank's report of this hang,
        which covers all ranks.
        """

        def write() -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            found = self._stat_report() if is_alone else None
            is_taken = found is not None and not _is_same(found, self._earlier_report)
            path = self._alone_path if is_taken else self.report_path
            path.write_text(
                "\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), *lines, ""]), encoding="utf-8"
            )

        self._put("report", write)

    def write_status(self, status: Status) -> None:
        """Replace ``status.json``."""
        self._put("status", partial(self._replace_status, status.model_dump_json() + "\n"))

    def flush(self, limit_s: float = IO_S) -> bool:
        """Wait until all queued writes are done; return False if they are not after ``limit_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_writing, limit_s)

    def _put(self, name: str, write: Callable[[], object]) -> None:
        """Add a write to the queue. Does not block."""
        with self._changed:
            self._queue[name] = write
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(
                    target=self._write_queued, name="watchdog-disk", daemon=True
                ).start()

    def _write_queued(self) -> None:
        """Run the thread of the writes until the queue is empty."""
        while True:
            with self._changed:
                if not self._queue:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
                write = self._queue.pop(next(iter(self._queue)))
            try:
                write()
            except Exception as error:
                self._warn(error)

    def _stat_report(self) -> os.stat_result | None:
        """Return the state of report.txt, None if there is none. Opens it:
        NFS answers a stat from its cache.
        """
        try:
            with open_regular(self.report_path) as file:
                return os.fstat(file.fileno())
        except FileNotFoundError:
            return None


def _is_same(one: os.stat_result, other: os.stat_result | None) -> bool:
    """Return True if a file was not written between two of its states."""
    return other is not None and (one.st_ino, one.st_mtime_ns, one.st_size) == (
        other.st_ino,
        other.st_mtime_ns,
        other.st_size,
    )
