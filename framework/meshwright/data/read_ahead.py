"""Read-ahead in threads (``data.workers``):
the next micro-batches of this rank are read while the current ones train.

    read(indices) --queue, in order--> gather (one thread at a time) --> finish (all threads) -->
    waiting read

The rank's next indices follow from the present ones: its replica reads blocks of ``chunks``
micro-batches, one block in each global batch; for a model with nn.SyncBatchNorm, whose replicas
alternate, every dp-th micro-batch. A wrong guess only costs time, since samples are a
function of their indices. The queue holds two micro-batches for each thread. Threads are daemons
and end with the process. With ``data.processes`` each thread has a process that finishes, see
:mod:`meshwright.data.worker_process`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from meshwright.config import Batch, phases
from meshwright.errors import DataError

Samples = tuple[Any, Tensor]
Start = Callable[[], Callable[[Any], Samples]]
"""Function that starts a worker process, and returns the function that runs ``finish`` in it."""


class Steps:
    """Sample indices of the steps and micro-batches of a run; with a batch-size ramp,
    steps grow.
    """

    def __init__(self, batch: Batch) -> None:
        """Take the numbers of a resolved ``batch``."""
        assert batch.micro_batch_size and batch.chunks and batch.global_batch, (
            "resolve the configuration first"
        )
        self.micro_batch_size = batch.micro_batch_size
        self._replicas = batch.global_batch // (batch.micro_batch_size * batch.chunks)
        self._phases = phases(batch)
        self.alternates = False
        """True where the micro-batches of the replicas alternate: NOTE [sample indices]."""

    def step_at(self, index: int) -> range:
        """Return the sample indices of the step that reads sample ``index``."""
        phase = [each for each in self._phases if each.samples_seen <= index][-1]
        size = phase.global_batch
        first = phase.samples_seen + (index - phase.samples_seen) // size * size
        return range(first, first + size)

    def begins_at(self, index: int) -> bool:
        """Return True if a step begins with sample ``index``."""
        return self.step_at(index).start == index

    def following(self, first: int) -> int:
        """Return the first index of the micro-batch that this replica reads after the one
        that starts at ``first``.
        """
        step = self.step_at(first)
        if self.alternates:
            after = first + self._replicas * self.micro_batch_size
            rest = (first - step.start) % (self._replicas * self.micro_batch_size)
            return after if after < step.stop else step.stop + rest
        own = len(step) // self._replicas
        replica = (first - step.start) // own
        after = first + self.micro_batch_size
        if after < step.start + (replica + 1) * own:
            return after
        later = self.step_at(step.stop)
        return later.start + replica * (len(later) // self._replicas)


class ReadAhead:
    """Micro-batches read ahead by threads."""

    def __init__(
        self,
        gather: Callable[[Sequence[int]], Any],
        finish: Callable[[Any], Samples],
        num_workers: int,
        steps: Steps,
        start_process: Start | None = None,
    ) -> None:
        """Run ``gather`` in the order of the reads, one at a time,
        and ``finish`` of its result in all threads.

        ``start_process``: starts a process for a thread and returns the ``finish`` that it
            computes.
        """
        self._gather, self._finish, self._start_process = gather, finish, start_process
        self._num_workers, self._steps = num_workers, steps
        self._jobs: queue.SimpleQueue[tuple[range, Future[Samples]]] = queue.SimpleQueue()
        self._in_order = threading.Lock()
        self._ahead: dict[range, Future[Samples]] = {}
        self._process = 0
        """Id of the process whose threads serve the queue;
        after a fork the child starts its own.
        """

    def read(self, indices: Sequence[int]) -> Samples:
        """Return the samples of these consecutive indices; blocks until a thread has read them.
        Queues the next.
        """
        wanted = range(indices[0], indices[0] + len(indices))
        if len(wanted) != self._steps.micro_batch_size:  # verify and tests read other numbers
            return self._finish(self._gather(indices))
        self._start()
        if wanted not in self._ahead:
            self._ahead[wanted] = self._submit(wanted)
        future, first = self._ahead[wanted], wanted.start
        for _ in range(2 * self._num_workers):
            first = self._steps.following(first)
            following = range(first, first + len(wanted))
            if following not in self._ahead:
                self._ahead[following] = self._submit(following)
        step = self._steps.step_at(wanted.start)
        for old in [each for each in self._ahead if each.start < step.start]:
            # those of the step are kept: some schedules read a micro-batch twice
            del self._ahead[old]
        return future.result()

    def expect_alternation(self) -> None:
        """Guess the next reads of replicas whose micro-batches alternate."""
        self._steps.alternates = True

    def _submit(self, wanted: range) -> Future[Samples]:
        future: Future[Samples] = Future()
        self._jobs.put((wanted, future))
        return future

    def _start(self) -> None:
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._in_order = threading.Lock()
        self._jobs = queue.SimpleQueue()
        self._ahead = {}
        for number in range(self._num_workers):
            threading.Thread(target=self._serve, name=f"data-{number}", daemon=True).start()

    def _serve(self) -> None:
        try:
            finish = self._finish if self._start_process is None else self._start_process()
        except BaseException as error:
            finish = partial(_fail, error)
        while True:
            with self._in_order:
                wanted, future = self._jobs.get()
                try:
                    gathered = self._gather(wanted)
                except BaseException as error:
                    future.set_exception(error)
                    continue
            try:
                future.set_result(finish(gathered))
            except BaseException as error:
                future.set_exception(error)


def _fail(error: BaseException, _: Any) -> Samples:
    """Raise the error with which the process of a thread could not be started."""
    raise DataError(
        "MW-DATA-121", f"a process of data.processes cannot be started: {error}"
    ) from error
