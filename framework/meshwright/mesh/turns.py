"""Two computations of one rank in turns: each runs while a message of the other is in flight.

    first     === post D .            wait D === post C .            wait C === ...
    second               === post d .                   wait d === post c .

A computation ends its turn between posting a message and waiting for it (:meth:`Turns.pause`),
however deep in a model's forward, autograd's backward or a recompute: each has a thread of its own,
and one of the two runs at a time. The order of turns depends only on the pauses, never on which
messages have arrived. So ranks with equal computations issue their collectives in the same order.

NOTE [backward on its own thread]: autograd has one thread per CUDA device. A backward that pauses
there would block every other backward of the process, such as that of a forward that calls
``torch.autograd.grad``: a deadlock. So the second computation runs its backward nodes on its own
thread, as on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Semaphore

import torch

Save = Callable[[], Callable[[], None]]
"""Function called as a turn ends; it returns the function that restores the state of
that computation.
"""


class ComputationAbandoned(BaseException):
    """Exception that ends a computation at its pause, because the other one has failed."""


class Turns:
    """Two computations in turns. The second one runs in a thread,
    which lives as long as this object.
    """

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._may_run = Semaphore(0), Semaphore(0)
        self._turn = 0
        """0: the first computation runs; 1: the second."""
        self._num_left = 0
        """Computations that have not ended; with fewer than two a pause does nothing."""
        self._failed = False
        self._save: Save = lambda: lambda: None

    def run(self, first: Callable[[], None], second: Callable[[], None], save: Save) -> None:
        """Run both in turns, beginning with the first; raise the error of the one that failed.

        ``save``: called when a turn ends, saves the state that both share, such as the present
            micro-batch's samples.
        """
        self._worker = self._worker or ThreadPoolExecutor(1, "turns")
        self._save, self._turn, self._num_left, self._failed = save, 0, 2, False
        ended = self._worker.submit(self._run_second, second, save(), current_stream())
        try:
            first()
        except ComputationAbandoned:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(0)
            error = ended.exception()
        if error is not None:
            raise error

    def pause(self) -> None:
        """Run the other computation, if there is one, until its next pause or its end.

        Call it after posting a message and before waiting for it.
        """
        if self._num_left < 2:
            return
        mine, restore = self._turn, self._save()
        self._turn = 1 - mine
        self._may_run[1 - mine].release()
        self._may_run[mine].acquire()
        if self._failed:
            raise ComputationAbandoned
        restore()

    def _run_second(
        self, second: Callable[[], None], restore: Callable[[], None], stream: object
    ) -> None:
        self._may_run[1].acquire()
        try:
            if not self._failed:
                restore()
                with on_stream(stream), torch.autograd.set_multithreading_enabled(False):
                    second()
        except ComputationAbandoned:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(1)

    def _end(self, which: int) -> None:
        """End a computation: the other one, if it has not ended, runs on without pauses."""
        self._num_left -= 1
        if self._num_left:
            self._turn = 1 - which
            self._may_run[1 - which].release()


def current_stream() -> object:
    """Return the current CUDA stream; None without CUDA in use."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


@contextmanager
def on_stream(stream: object) -> Iterator[None]:
    """Use another thread's device and stream in this one."""
    if isinstance(stream, torch.cuda.Stream):
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield
    else:
        yield
