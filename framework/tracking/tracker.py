"""Hands each record on: at once to ``metrics.jsonl``, and by a queue and a thread each to everything else.

    write(record) --+--> truth.write            on the caller's thread: the truth is complete when the step is
                    +--> [bounded queue] --> thread --> console
                    +--> [bounded queue] --> thread --> wandb

A queue of its own for every sink, so that one which blocks does not hold up its neighbour. The threads are daemons:
they cannot keep the process alive. A full queue drops the record and counts it; an exception ends that sink with a
warning; closing has a time limit, after which what is still busy is left behind. Nothing that a sink does reaches the
caller.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

from meshwright.terminal.output import tell
from meshwright.tracking.record import StepRecord
from meshwright.tracking.sink import Sink


class _End(NamedTuple):
    failed: bool


def warn_on_stderr(message: str) -> None:
    """Where warnings go unless the run says otherwise."""
    tell(f"tracking: {message}")


def quietly(warn: Callable[[str], None], message: str) -> None:
    """Warn; a warning that cannot be written (stderr is closed) is not worth a run either."""
    with contextlib.suppress(Exception):
        warn(message)


class Tracker:
    """One per process; ranks that tell nothing have one without sinks. Use it as a context manager, or close it.

    ``truth`` is opened at once and written on the caller's thread; ``sinks`` each behind a queue of ``queue_size``
    records. ``write`` never raises and never waits for a sink in ``sinks``.
    """

    def __init__(
        self,
        truth: Sink | None = None,
        sinks: Sequence[Sink] = (),
        *,
        queue_size: int = 1024,
        close_limit_s: float = 15.0,
        warn: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        self._truth = truth
        self._truth_failures = 0
        self.lost: str | None = None
        """After ``close``: what of the truth was lost for good, in words."""
        self._warn = warn
        self._close_limit_s = close_limit_s
        self._closed = False
        self._lanes = [_Lane(sink, queue_size, warn) for sink in sinks]
        if truth is not None:
            self._guard_truth(truth.open)

    def write(self, record: StepRecord) -> None:
        """Tell a step. Blocks for one small write to a local file, nothing else."""
        assert not self._closed, "the tracker is closed"
        truth = self._truth
        if truth is not None:
            self._guard_truth(lambda: truth.write(record))
        for lane in self._lanes:
            lane.put(record)

    def close(self, failed: bool = False) -> None:
        """Let the sinks finish, for at most ``close_limit_s`` in all. ``failed``: the run ended by an error."""
        if self._closed:
            return
        self._closed = True
        self._close_truth(failed)
        for lane in self._lanes:
            lane.end(failed)
        deadline = time.monotonic() + self._close_limit_s
        for lane in self._lanes:
            lane.join(deadline)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _guard_truth(self, action: Callable[[], None]) -> None:
        """The truth is tried again with every record: what failed (a full disk) may pass. Warns of the first failure,
        the tenth, the hundredth, and when all is written again."""
        try:
            action()
        except Exception as error:
            self._truth_failures += 1
            if self._truth_failures in WARN_AT:
                quietly(
                    self._warn,
                    f"{_why(self._truth, error)}. The run goes on; its records wait in memory "
                    f"({_waiting(self._truth):,} so far) and it is tried again with every step",
                )
        else:
            if self._truth_failures:
                quietly(self._warn, f"{_place(self._truth)} is written again, with all that waited")
            self._truth_failures = 0

    def _close_truth(self, failed: bool) -> None:
        """The last try. What is lost for good is kept in ``lost``, and said."""
        truth = self._truth
        if truth is None:
            return
        why = ""
        try:
            truth.close(failed)
        except Exception as error:
            why = f": {_why(truth, error)}"
        dropped: int = getattr(truth, "dropped", 0)
        number = _waiting(truth) + dropped
        if number or why:
            self.lost = (
                f"{number:,} record{'s' * (number != 1)} of this run could not be written to {_place(truth)}{why}"
            )
            quietly(self._warn, self.lost)


WARN_AT = frozenset(10**power for power in range(12))
"""Failures in a row that are warned of."""


def _waiting(truth: Sink | None) -> int:
    return int(getattr(truth, "waiting", 0))


def _place(truth: Sink | None) -> str:
    """The path of the file, or the name of the sink."""
    return str(getattr(truth, "path", type(truth).__name__))


def _why(truth: Sink | None, error: Exception) -> str:
    """Path, reason and errno."""
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename or _place(truth)} cannot be written: {error.strerror} (errno {error.errno})"
    return f"{_place(truth)} cannot be written: {type(error).__name__}: {error}"


class _Lane:
    """A sink, its queue and its thread.

    The queue itself is unbounded and ``put`` looks at its length first: with one writer that bounds it exactly, and the
    end can be put at any time without waiting.
    """

    def __init__(self, sink: Sink, queue_size: int, warn: Callable[[str], None]) -> None:
        assert queue_size > 0, queue_size
        self._sink = sink
        self._queue: SimpleQueue[StepRecord | _End] = SimpleQueue()
        self._queue_size = queue_size
        self._warn = warn
        self._disabled = threading.Event()
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracking {_name(sink)}", daemon=True)
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
            quietly(
                self._warn,
                f"{_name(self._sink)} was slower than the run: {self._dropped} records were not told to it. "
                "They are in metrics.jsonl.",
            )
        if self._thread.is_alive():
            quietly(
                self._warn,
                f"{_name(self._sink)} did not finish in time and was left behind. All records are in metrics.jsonl.",
            )

    def _work(self) -> None:
        failed = False
        try:
            self._sink.open()
            while isinstance(item := self._queue.get(), StepRecord):
                self._sink.write(item)
            failed = item.failed
        except Exception as error:
            self._disabled.set()
            quietly(self._warn, f"{_name(self._sink)} is switched off after an error, the run goes on: {error}")
            failed = True
        try:
            self._sink.close(failed)
        except Exception as error:
            quietly(self._warn, f"{_name(self._sink)} could not be closed: {error}")


def _name(sink: Sink | None) -> str:
    return type(sink).__name__
