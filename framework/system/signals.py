"""Requests to end a run, by Slurm, a launcher or a user: all ranks save at the same step, and leave with exit code 85.

rank 5      SIGTERM      recorded
all ranks   ... STEP     the reduction that every step does anyway carries the request to all, in the same step
all ranks   save         further signals change nothing
all ranks   leave        Preempted: exit code 85, "run the same command again"

A signal that was ignored when the run was started (SIGHUP under nohup) stays ignored, in the launcher and in all ranks.

"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LISTENING = "MESHWRIGHT_LISTENING"
"""Environment variable with a directory. A process that handles signals creates a file there, named by its id."""


def ignored() -> list[signal.Signals]:
    """Return those of SIGNALS that this process ignores, as whoever started it set up."""
    return [each for each in SIGNALS if signal.getsignal(each) is signal.SIG_IGN]


class StopRequest:
    """Context manager that stores the first of SIGNALS instead of ending the process; later ones change nothing.

    On exit it restores the handlers, unless a signal has arrived. The process then leaves with its work saved, and a
    second signal must not change its exit.

    A handler of Python's runs between two instructions of the main thread: a rank that waits in a collective notes the
    signal when the collective has ended. In a thread that is not the main one it does nothing.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """First signal received; None before it."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for each in set(SIGNALS).difference(ignored()):
                self._before[each] = signal.signal(each, self._note)
            place = os.environ.get(LISTENING)
            if place:
                (Path(place) / str(os.getpid())).touch()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.signal is None:
            for each, handler in self._before.items():
                signal.signal(each, handler)

    def requested(self) -> bool:
        """Return True from the first signal on."""
        return self.signal is not None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(signum)
