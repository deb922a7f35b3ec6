"""This process: requests to stop, file locks, threads and exit without waiting,
versions of its software. No torch.

Slurm, a launcher or a user stops a run with a signal. All ranks save at the same step and leave
with exit code 85:

    rank 5      SIGTERM      recorded
    all ranks   ... STEP     the all-reduce of every step carries the request to all ranks, in the same step
    all ranks   save         further signals are ignored
    all ranks   leave        Preempted: exit code 85, "run the same command again"

SIGHUP and SIGINT that were ignored when the run was started (nohup, a shell's &) stay ignored, in
the launcher and in all ranks. The others are handled all the same: torchrun's wrapper in a job
script ignores USR1 and USR2 for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from meshwright.errors import HangError, UserError
from meshwright.terminal.output import tell

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop."""
KEPT_IGNORED = (signal.SIGHUP, signal.SIGINT)
"""Signals that stay ignored if this process inherits that."""
LISTENING = "MESHWRIGHT_LISTENING"
"""Environment variable with a directory. A process that handles signals creates a file there,
named by its id.
"""

GiveUp = Callable[[UserError], None]
"""Handler that ends this process, whose main thread may be stuck; called in another thread.
Returns only if a recovery in place ends what the main thread waits for.
"""


class StopRequest:
    """Context manager that stores the first of SIGNALS instead of ending the process;
    later ones are ignored.

    On exit it restores the handlers, unless a signal has arrived. The process then leaves with its
    work saved, and a second signal must not change its exit.

    Python runs a handler between two instructions of the main thread: a rank that waits in a
    collective stores the signal when the collective has ended. Entered from another thread it has
    no effect.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """First signal received; None before it."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for each in set(SIGNALS).difference(ignored_signals()):
                self._before[each] = signal.signal(each, self._store)
            place = os.environ.get(LISTENING)
            if place:
                (Path(place) / str(os.getpid())).touch()
        return self

    def __exit__(self, *error: object) -> None:
        if self.signal is None:
            for each, handler in self._before.items():
                signal.signal(each, handler)

    def is_requested(self) -> bool:
        """Return True from the first signal on."""
        return self.signal is not None

    def _store(self, signum: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(signum)


def ignore_signals() -> None:
    """Ignore SIGNALS until this process exits,
    because its work is saved and its exit code must not change.
    """
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def ignored_signals() -> list[signal.Signals]:
    """Return those of KEPT_IGNORED that this process ignores, inherited from its parent process."""
    return [each for each in KEPT_IGNORED if signal.getsignal(each) is signal.SIG_IGN]


class FileLock:
    """Kernel lock (flock) on an open file or directory; it ends with :meth:`close`,
    or with this process.

    A killed process leaves nothing to clean up. Forked children do not hold the lock, nor do the
    programs they execute.

    NOTE [filelock package]: its UnixFileLock takes exclusive locks only, falls back to a marker
    file where there is no flock, and hides the descriptor. A run's lock needs a shared probe that
    excludes nobody, a warning instead of a marker, and the descriptor to detect that the file was
    replaced.
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT, mode: int = 0o644) -> None:
        """Open the file without taking the lock. Raises OSError."""
        self.descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
        os.register_at_fork(after_in_child=self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, *, is_shared: bool = False) -> bool:
        """Try to take the lock, without blocking. Return False if another open file holds it.

        Raises:
            OSError: the file system has no locks, or does not answer.
        """
        try:
            fcntl.flock(
                self.descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
            )
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close the file, which releases the lock."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_daemon_threads(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> list[Result]:
    """Return the results for all items, in order, or raise the first error; blocks.

    The interpreter waits at exit for the threads of a ThreadPoolExecutor, but not for these, should
    a read hang.
    """
    futures = [(item, Future[Result]()) for item in items]
    waiting = iter(futures)

    def work() -> None:
        for item, future in waiting:
            try:
                future.set_result(function(item))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(num_threads, len(futures))):
        threading.Thread(target=work, daemon=True).start()
    return [future.result() for _, future in futures]


def leave(exit_code: int, after_s: float = 0.0) -> None:
    """End this process without the interpreter's shutdown,
    which may wait for threads and peers that are gone.

    Flushes stdout and stderr, then waits ``after_s`` seconds.
    """
    for stream in (sys.stdout, sys.stderr):
        # closed from the start, or a pipe without a reader
        with contextlib.suppress(AttributeError, OSError):
            stream.flush()
    time.sleep(after_s)
    os._exit(exit_code)


def end_process(error: UserError) -> None:
    """Print one message and exit: the default of :data:`GiveUp`."""
    tell(f"meshwright: error: {error}")
    if isinstance(error, HangError):
        error.linger()
    leave(error.exit_code)


def is_alive(pid: int) -> bool:
    """Return True if this machine has a process of that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def versions() -> dict[str, str]:
    """Return the versions of meshwright, Python and torch, as checkpoints record them.
    Does not import torch.
    """
    return {
        "meshwright": own_version(),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def own_version() -> str:
    """Return the installed version of meshwright."""
    return _version("meshwright")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
