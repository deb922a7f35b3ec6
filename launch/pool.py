"""Ranks started once and used for many worlds: what the tests and ``meshwright verify`` run on.

    run(f, 4) -> [f(0, 4), f(1, 4), f(2, 4), f(3, 4)]        each in a process of its own, joined by gloo

    parent     | fork x max_ranks | (f, args) -> 0..3 | <- results | release 0..3 |   (g, args) -> 0..7 | ...
    worker 2   | ....... waits .. | join f leave      | result ->  | take down    |   join g leave      | ...

The workers are forked from the calling process after torch is imported, so that a world of 8 ranks costs a fifth of a
second and not fifteen. Each world meets in a file store of its own: the group of one can never meet another's. When a
rank raises, dies or hangs, all workers are killed and the next call forks new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.launch.forking import die_with, loopback, preload
from meshwright.launch.leftovers import own_directory, remove_leftovers

GRACE_S = 0.2
"""After a first failure: how long others may still report theirs, so that the earliest is known."""


class RankError(RuntimeError):
    """A rank of a world failed. The message begins with the rank that failed first; ``rank`` is that one.

    The exception that the rank raised is the ``__cause__`` when it could be sent.
    """

    def __init__(self, message: str, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class RankTimeout(RankError):
    """Ranks had not answered in time; ``ranks`` names them."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        self.ranks = ranks
        super().__init__(message, ranks[0])


class Call(NamedTuple):
    """What one worker is asked to do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    timeout_s: float


class Failure(NamedTuple):
    """What a worker says when its rank raised; ``at_s`` is on the clock that all processes share."""

    at_s: float
    summary: str
    trace: str
    error: bytes | None


class Worker(NamedTuple):
    """One forked process, the parent's end of its pipe, and the file that it writes its stack to when asked."""

    pid: int
    pipe: Connection
    stack: Path


class RankPool:
    """Up to ``max_ranks`` worker processes on this machine's CPU, for one world at a time.

    Make it in the main thread and close it (``with``); the workers die with the parent, however that dies. A function
    is sent by its name: changes made to its module after the fork (a monkeypatch) are not seen by the workers.
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

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """``[function(rank, world_size, *args) for each rank]``, all ranks at once, with a gloo group between them.

        RANK, WORLD_SIZE and LOCAL_RANK are set during the call; torch's generator starts at seed 0 in every rank.
        Blocks until all ranks have answered. Arguments and results are pickled.

        Raises:
            RankError: a rank raised or died: the one that did so first, with its traceback.
            RankTimeout: after ``timeout_s`` some ranks had not answered; tells where each of them stood.
        """
        assert 1 <= world_size <= self.max_ranks, f"world_size {world_size}, but the pool has {self.max_ranks} ranks"
        while len(self._workers) < self.max_ranks:
            self._workers.append(self._fork(len(self._workers)))
        self._num_worlds += 1
        store = str(self._directory / f"world-{self._num_worlds}")
        calls = [
            pickle.dumps(Call(function, args, rank, world_size, store, timeout_s)) for rank in range(world_size)
        ]  # all pickled before any is sent: an argument that cannot be pickled leaves the workers as they are
        workers = self._workers[:world_size]
        try:
            for worker, call in zip(workers, calls, strict=True):
                with contextlib.suppress(BrokenPipeError):  # a worker that died is found when its answer is awaited
                    worker.pipe.send_bytes(call)
            results = _gather(workers, timeout_s)
            for worker in workers:
                worker.pipe.send_bytes(b"")
        except BaseException:
            self.kill()
            raise
        return results

    def pids(self) -> list[int]:
        """Process ids of the workers by rank; empty before the first call and after a failure."""
        return [worker.pid for worker in self._workers]

    def kill(self) -> None:
        """Kill all workers now; the next call forks new ones."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
            worker.pipe.close()
        self._workers = []

    def close(self) -> None:
        """End the workers and remove what they met in."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _fork(self, index: int) -> Worker:
        mine, theirs = Pipe()
        stack = self._directory / f"stack-{index}"
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                die_with(parent)
                mine.close()
                for other in self._workers:  # inherited ends would keep a pipe open that the parent has closed
                    other.pipe.close()
                _serve(theirs, stack)
            finally:
                os._exit(1)
        theirs.close()
        return Worker(pid, mine, stack)


def _gather(workers: list[Worker], timeout_s: float) -> list[Any]:
    """Wait for the answers of all ranks; raise the earliest failure."""
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
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
                # Others see a dead rank as a closed connection: it failed before them, whenever we hear of it.
                answer = Failure(0.0, _how_it_ended(workers[rank].pid), "", None)
            if isinstance(answer, Failure):
                if not failures:
                    deadline_s = time.monotonic() + GRACE_S
                failures[rank] = answer
            else:
                results[rank] = answer[0]
    if failures:
        raise _rank_error(failures) from _cause(failures)
    if waiting:
        raise _timeout(workers, sorted(waiting.values()), timeout_s)
    return [results[rank] for rank in range(len(workers))]


def _how_it_ended(pid: int) -> str:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"left with exit code {status}"


def _first(failures: dict[int, Failure]) -> int:
    return min(failures, key=lambda rank: failures[rank].at_s)


def _rank_error(failures: dict[int, Failure]) -> RankError:
    rank = _first(failures)
    lines = [f"rank {rank}: {failures[rank].summary}"]
    if failures[rank].trace:
        lines.append(failures[rank].trace.rstrip())
    lines += [f"then rank {other}: {failures[other].summary}" for other in sorted(failures) if other != rank]
    return RankError("\n".join(lines), rank)


def _cause(failures: dict[int, Failure]) -> BaseException | None:
    error = failures[_first(failures)].error
    return None if error is None else pickle.loads(error)


def _timeout(workers: list[Worker], ranks: list[int], timeout_s: float) -> RankTimeout:
    """Ask the silent ranks for their stacks and put them into the message: the one to blame is not in a collective."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank].pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    lines = [f"after {timeout_s:g} s no answer from ranks {ranks} of {len(workers)}; they stood at"]
    for rank in ranks:
        text = workers[rank].stack.read_text() if workers[rank].stack.exists() else ""
        lines += [f"rank {rank}:", text.rstrip()]
    return RankTimeout("\n".join(lines), ranks)


def _serve(pipe: Connection, stack: Path) -> None:
    """The life of a worker: a world per message, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    gc.freeze()  # what was here before the first world stays: looking for garbage is then quick
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        with contextlib.suppress(EOFError):
            while True:
                answer = _answer(pipe.recv_bytes())
                sys.stdout.flush()
                sys.stderr.flush()
                pipe.send_bytes(answer)
                # Now the parent either releases all ranks together, so that none leaves while another still talks to
                # it, or, when a rank failed, kills all: until then the failed rank's connections stay open and its
                # peers have no error of their own to report.
                pipe.recv_bytes()
                _take_down()
    os._exit(0)


def _answer(message: bytes) -> bytes:
    """Run one call: the pickled result in a tuple, or a :class:`Failure`."""
    try:
        call: Call = pickle.loads(message)
        with _world(call):
            return pickle.dumps((call.function(call.rank, call.world_size, *call.args),))
    except BaseException as error:
        at_s = time.monotonic()
        return pickle.dumps(
            Failure(at_s, "".join(traceback.format_exception_only(error)).strip(), traceback.format_exc(), _dump(error))
        )


def _dump(error: BaseException) -> bytes | None:
    """The exception for the parent, if it survives the way there and back."""
    try:
        dumped = pickle.dumps(error)
        pickle.loads(dumped)
    except Exception:
        return None
    return dumped


@contextlib.contextmanager
def _world(call: Call) -> Iterator[None]:
    """Join a new world, as a fresh process would: its environment, its group, its random state."""
    import torch
    import torch.distributed as dist

    before = dict(os.environ)
    os.environ.update(RANK=str(call.rank), WORLD_SIZE=str(call.world_size), LOCAL_RANK=str(call.rank))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(call.store, call.world_size),  # type: ignore[attr-defined]
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout_s + 30),  # the parent's limit comes first: it can tell who hangs
        )
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _take_down() -> None:
    """End the world, and all that still holds its groups: each keeps three threads, one of which wakes every 10 ms."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
