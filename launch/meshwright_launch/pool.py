"""Pool of ranks that are started once and reused for many worlds,
by the tests and ``meshwright verify``.

    run(f, 4) -> [f(0, 4), f(1, 4), f(2, 4), f(3, 4)]        each in a process of its own, joined by gloo

    parent     | fork x max_ranks | (f, args) -> 0..3 | <- results | release 0..3 |   (g, args) -> 0..7 | ...
    worker 2   | blocks           | init group, run f | result ->  | destroy group|   init group, run g | ...

The workers are forked from the calling process after torch is imported. A world of 8 ranks
therefore starts in 0.2 s instead of 15 s. Each world uses a rendezvous file of its own, so that the
groups of two worlds never mix. When a rank raises, dies or hangs, all workers are killed and the
next call forks new ones.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.system.bounded import read_text
from meshwright_launch.forking import die_with_parent, preload
from meshwright_launch.leftovers import own_directory, remove_leftovers
from meshwright_launch.worker import WorkerCall, WorkerFailure, serve

GRACE_S = 0.2
"""Time for other ranks to report a failure after the first report,
so that the earliest failure is found.
"""


class RankError(RuntimeError):
    """Failure of a rank in a world. The message begins with the rank that failed first,
    also in ``rank``.

    The exception that the rank raised is the ``__cause__`` if it could be pickled.
    """

    def __init__(self, message: str, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class RankTimeout(RankError):
    """Timeout of a world; ``ranks`` lists the ranks without a result."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        self.ranks = ranks
        super().__init__(message, ranks[0])


class Worker(NamedTuple):
    """Forked process, the parent's end of its pipe,
    and the file to which SIGUSR1 makes it write its stack.
    """

    pid: int
    pipe: Connection
    stack: Path


class RankPool:
    """Pool of up to ``max_ranks`` worker processes on this machine's CPU, for one world at a time.

    Create it in the main thread and close it (``with``). The workers die with the parent, however
    that dies. Functions are pickled by name: workers do not see changes made to a module after the
    fork (a monkeypatch).
    """

    def __init__(self, max_ranks: int = 8) -> None:
        assert max_ranks >= 1
        self.max_ranks = max_ranks
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=own_directory()))
        self._workers: list[Worker] = []
        self._num_worlds = 0
        remove_leftovers()
        preload()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
    ) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` in all ranks at once,
        with a gloo group between them.

        Blocks until all ranks have finished. RANK, WORLD_SIZE and LOCAL_RANK are set during the
        call; torch's generator starts at seed 0 in every rank. Arguments and results are pickled.

        Returns:
            The results, by rank.

        Raises:
            RankError: a rank raised or died. Has the first such rank, with its traceback.
            RankTimeout: some ranks had not finished after ``timeout_s``. Has the stack of each.
        """
        assert 1 <= world_size <= self.max_ranks, (
            f"world_size {world_size}, but the pool has {self.max_ranks} ranks"
        )
        while len(self._workers) < self.max_ranks:
            self._workers.append(self._fork(len(self._workers)))
        self._num_worlds += 1
        store = str(self._directory / f"world-{self._num_worlds}")
        calls = [
            pickle.dumps(WorkerCall(function, args, rank, world_size, store, timeout_s))
            for rank in range(world_size)
        ]  # all are pickled before any is sent: an argument that cannot be pickled leaves the workers unharmed
        workers = self._workers[:world_size]
        try:
            for worker, call in zip(workers, calls, strict=True):
                # a dead worker is reported when its result is missing
                with contextlib.suppress(BrokenPipeError):
                    worker.pipe.send_bytes(call)
            results = _gather(workers, timeout_s)
            for worker in workers:
                worker.pipe.send_bytes(b"")
        except BaseException:
            self.kill()
            raise
        return results

    def pids(self) -> list[int]:
        """Return the workers' process ids by rank;
        empty before the first call and after a failure.
        """
        return [worker.pid for worker in self._workers]

    def kill(self) -> None:
        """Kill all workers; the next call forks new ones."""
        for worker in self._workers:
            # reaped already: the number may be another process's by now
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                    os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
            worker.pipe.close()
        self._workers = []

    def close(self) -> None:
        """Kill the workers and remove the pool's temporary directory."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _fork(self, index: int) -> Worker:
        parent_end, worker_end = Pipe()
        stack = self._directory / f"stack-{index}"
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                parent_end.close()
                # inherited ends would keep a pipe open after the parent has closed it
                for other in self._workers:
                    other.pipe.close()
                serve(worker_end, stack)
            finally:
                os._exit(1)
        worker_end.close()
        return Worker(pid, parent_end, stack)


def _gather(workers: list[Worker], timeout_s: float) -> list[Any]:
    """Wait for the results of all ranks; raise the earliest failure."""
    results: dict[int, Any] = {}
    failures: dict[int, WorkerFailure] = {}
    deadline_s = time.monotonic() + timeout_s
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                # Peers see a dead rank as a closed connection. It failed before they did, whenever
                # its pipe closes.
                answer = WorkerFailure(0.0, _describe_exit(workers[rank].pid), "", None)
            if isinstance(answer, WorkerFailure):
                if not failures:
                    deadline_s = time.monotonic() + GRACE_S
                failures[rank] = answer
            else:
                results[rank] = answer[0]
    if failures:
        first = min(failures, key=lambda rank: failures[rank].at_s)
        error = failures[first].error
        raise _rank_error(failures, first) from None if error is None else pickle.loads(error)
    if waiting:
        raise _timeout(workers, sorted(waiting.values()), timeout_s)
    return [results[rank] for rank in range(len(workers))]


def _describe_exit(pid: int) -> str:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"


def _rank_error(failures: dict[int, WorkerFailure], rank: int) -> RankError:
    """Return the error of ``rank``, which failed first, with a line for each later failure."""
    lines = [f"rank {rank}: {failures[rank].summary}"]
    if failures[rank].trace:
        lines.append(failures[rank].trace.rstrip())
    lines += [
        f"then rank {other}: {failures[other].summary}"
        for other in sorted(failures)
        if other != rank
    ]
    return RankError("\n".join(lines), rank)


def _timeout(workers: list[Worker], ranks: list[int], timeout_s: float) -> RankTimeout:
    """Return the error with the stacks of ranks without a result:
    the one outside a collective is to blame.
    """
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank].pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    lines = [f"after {timeout_s:g} s no result from ranks {ranks} of {len(workers)}; their stacks:"]
    for rank in ranks:
        text = read_text(workers[rank].stack) if workers[rank].stack.exists() else ""
        lines += [f"rank {rank}:", text.rstrip()]
    return RankTimeout("\n".join(lines), ranks)
