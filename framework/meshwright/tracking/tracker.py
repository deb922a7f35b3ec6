"""Tracker that writes each record to ``metrics.jsonl`` at once,
and to each other sink through a queue and a thread.

    write(record) --+--> metrics_sink.write     on the caller's thread: the file is complete when the step is
                    +--> [bounded queue] --> thread --> console
                    +--> [bounded queue] --> thread --> wandb

Each sink has its own queue, so that a blocked sink does not delay the others. The threads are
daemons: they cannot keep the process alive. A full queue drops the record and counts it. An
exception ends that sink with a warning. Closing has a time limit, after which busy sinks are
abandoned. No error of a sink reaches the caller.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Protocol

from meshwright.errors import reason_of
from meshwright.system.secret_text import hide_secrets
from meshwright.terminal.output import Warn, tell
from meshwright.tracking.jsonl import JsonlSink
from meshwright.tracking.record import StepRecord

WARN_AT = frozenset(10**power for power in range(12))
"""Numbers of consecutive failures that trigger a warning."""


class Sink(Protocol):
    """Consumer of records. The tracker calls its methods on one thread of its own,
    in the order written here.

    They may block or raise; only this sink is affected.
    """

    def open(self) -> None:
        """Open the sink, once, before the first record. Slow work belongs here."""

    def write(self, record: StepRecord) -> None:
        """Write the record of one step. Steps increase."""

    def close(self, failed: bool = False) -> None:
        """Finish. ``failed``: the run ended with an error,
        or ``open`` or ``write`` of this sink raised.
        """


class LateSink:
    """Sink that is made in its own thread, when it is opened:
    what a user's constructor does ends only this sink.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name = name
        self._make = make
        self._sink: Sink | None = None

    def open(self) -> None:
        """Make the sink, and open it."""
        self._sink = self._make()
        self._sink.open()

    def write(self, record: StepRecord) -> None:
        """Write the record of one step."""
        assert self._sink is not None
        self._sink.write(record)

    def close(self, failed: bool = False) -> None:
        """Close the sink, if it was made."""
        if self._sink is not None:
            self._sink.close(failed)


def warn_on_stderr(message: str) -> None:
    """Print a warning to stderr: the default for ``warn``.
    On a terminal its lines break between words.
    """
    text = f"tracking: {hide_secrets(message)}"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
        if sys.stderr.isatty():
            columns = max(40, shutil.get_terminal_size().columns)
            lines = textwrap.wrap(
                text,
                columns,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            text = "\n".join(lines)
    tell(text)


def never_raising(warn: Warn) -> Warn:
    """Return ``warn`` without its exceptions:
    a warning may be impossible to print (stderr is closed).
    """

    def call(message: str) -> None:
        with contextlib.suppress(Exception):
            warn(message)

    return call


class Tracker:
    """Tracker of one process. Ranks that write nothing have one without sinks.
    Use as a context manager, or close it.

    ``metrics_sink`` is opened at once and written on the caller's thread. Each of ``sinks`` has a
    queue of ``queue_size`` records. ``write`` never raises and never blocks on a sink in ``sinks``.
    """

    def __init__(
        self,
        metrics_sink: JsonlSink | None = None,
        sinks: Sequence[Sink] = (),
        *,
        queue_size: int = 1024,
        close_limit_s: float = 15.0,
        warn: Warn = warn_on_stderr,
    ) -> None:
        self._metrics_sink = metrics_sink
        self._failures = 0
        self.lost: str | None = None
        """Description of the records that ``metrics.jsonl`` lacks permanently; set by ``close``."""
        self._warn = never_raising(warn)
        self._close_limit_s = close_limit_s
        self._closed = False
        self._queued = [_QueuedSink(sink, queue_size, self._warn) for sink in sinks]
        if metrics_sink is not None:
            self._try(metrics_sink, metrics_sink.open)

    def write(self, record: StepRecord) -> None:
        """Write the record of one step. Blocks only for one small write to a local file."""
        assert not self._closed, "the tracker is closed"
        metrics_sink = self._metrics_sink
        if metrics_sink is not None:
            self._try(metrics_sink, lambda: metrics_sink.write(record))
        for sink in self._queued:
            sink.put(record)

    def close(self, failed: bool = False) -> None:
        """Close the sinks, within ``close_limit_s`` in total. ``failed``:
        the run ended with an error.
        """
        if self._closed:
            return
        self._closed = True
        if self._metrics_sink is not None:
            self._close_metrics(self._metrics_sink)
        for sink in self._queued:
            sink.end(failed)
        deadline = time.monotonic() + self._close_limit_s
        for sink in self._queued:
            sink.join(deadline)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def _try(self, sink: JsonlSink, action: Callable[[], None]) -> None:
        """Run an action on the metrics sink, and warn instead of raising.

        Later records retry it, because the cause (a full disk) may pass. The first, tenth,
        hundredth, ... failure and the recovery are logged.
        """
        try:
            action()
        except Exception as error:
            self._failures += 1
            if self._failures in WARN_AT:
                self._warn(
                    f"{_describe(sink, error)}. The run continues; its records wait in memory "
                    f"({sink.waiting:,} so far), and the write is retried with every step"
                )
        else:
            if self._failures:
                self._warn(f"{sink.path} is written again, including the records that waited")
            self._failures = 0

    def _close_metrics(self, sink: JsonlSink) -> None:
        """Close the metrics sink with a last attempt to write;
        set ``lost`` and warn if records are lost.
        """
        why = ""
        try:
            sink.close()
        except Exception as error:
            why = f": {_describe(sink, error)}"
        number = sink.waiting + sink.dropped
        if number or why:
            self.lost = (
                f"{number:,} record{'s' * (number != 1)} of this run could not be written to"
                f" {sink.path}{why}"
            )
            self._warn(self.lost)


def _describe(sink: JsonlSink, error: Exception) -> str:
    """Describe a failure: path, reason and errno."""
    if isinstance(error, OSError) and error.strerror is not None:
        return (
            f"{error.filename or sink.path} cannot be written: {error.strerror} (errno"
            f" {error.errno})"
        )
    return f"{sink.path} cannot be written: {type(error).__name__}: {error}"


class _End(NamedTuple):
    failed: bool


class _QueuedSink:
    """A sink with its queue and its thread.

    The queue is unbounded, and ``put`` checks its length first. With one writer this bounds it
    exactly, and the end marker can be added at any time without blocking.
    """

    def __init__(self, sink: Sink, queue_size: int, warn: Warn) -> None:
        assert queue_size > 0, queue_size
        self._sink = sink
        self._name = sink.name if isinstance(sink, LateSink) else type(sink).__name__
        self._queue: SimpleQueue[StepRecord | _End] = SimpleQueue()
        self._queue_size = queue_size
        self._warn = warn
        self._disabled = threading.Event()
        self._dropped = 0
        self._thread = threading.Thread(
            target=self._work, name=f"tracking {self._name}", daemon=True
        )
        self._thread.start()

    def put(self, record: StepRecord) -> None:
        if self._disabled.is_set():
            return
        if self._queue.qsize() >= self._queue_size:
            self._dropped += 1
        else:
            self._queue.put(record)

    def end(self, failed: bool) -> None:
        self._queue.put(_End(failed))

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._dropped:
            self._warn(
                f"{self._name} was slower than the run: {self._dropped} records were not passed to"
                " it. They are in metrics.jsonl."
            )
        if self._thread.is_alive():
            self._warn(
                f"{self._name} did not finish in time and was left behind. All records are in"
                " metrics.jsonl."
            )

    def _work(self) -> None:
        try:
            self._sink.open()
            while isinstance(item := self._queue.get(), StepRecord):
                self._sink.write(item)
            failed = item.failed
        except BaseException as error:
            # also what a user's sink derives from it: only this sink ends
            self._disabled.set()
            self._warn(
                f"{self._name} is switched off after an error, the run continues:"
                f" {reason_of(error)}"
            )
            failed = True
        try:
            self._sink.close(failed)
        except BaseException as error:
            # also what a user's sink derives from it: only this sink ends
            self._warn(f"{self._name} could not be closed: {reason_of(error)}")
