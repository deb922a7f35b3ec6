"""Worker of a rank pool: a forked process that runs one world after the other until the pool closes
its pipe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.system.host import loopback
from meshwright.terminal.output import make_printable


class WorkerCall(NamedTuple):
    """Function call for one worker, with the world to run it in."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    timeout_s: float


class WorkerFailure(NamedTuple):
    """Failure record of a worker. ``at_s`` is read from the clock that all processes
    of the machine share.
    """

    at_s: float
    summary: str
    trace: str
    error: bytes | None


def serve(pipe: Connection, stack: Path) -> None:
    """Run a worker's loop, one world per message, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    make_printable()
    _renew_thread_pool()
    gc.freeze()  # exempts what exists before the first world, so that collections stay fast
    with stack.open("w", encoding="utf-8", errors="backslashreplace") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        with contextlib.suppress(EOFError):
            while True:
                result = _run(pipe.recv_bytes())
                sys.stdout.flush()
                sys.stderr.flush()
                pipe.send_bytes(result)
                # The parent now releases all ranks together, so that none exits while a peer
                # communicates with it. If a rank failed, the parent kills all instead. Until then
                # the failed rank's connections stay open, and its peers have no error to report.
                pipe.recv_bytes()
                _destroy_groups()
    os._exit(0)


def _renew_thread_pool() -> None:
    """Replace torch's thread pool, which is unusable after a fork,
    while this process has one thread.

    Otherwise each of gloo's threads replaces it in its first copy of a large tensor. Two at once
    race, and the message fails with "Invalid thread pool!" (torch 2.13, ``caffe2::pthreadpool``).
    """
    import torch

    torch.set_num_threads(1)


def _run(message: bytes) -> bytes:
    """Run one call; return the pickled result in a tuple, or a pickled :class:`WorkerFailure`."""
    try:
        call: WorkerCall = pickle.loads(message)
        with _world(call):
            return pickle.dumps((call.function(call.rank, call.world_size, *call.args),))
    except BaseException as error:
        at_s = time.monotonic()
        summary = "".join(traceback.format_exception_only(error)).strip()
        return pickle.dumps(WorkerFailure(at_s, summary, traceback.format_exc(), _dump(error)))


def _dump(error: BaseException) -> bytes | None:
    """Pickle the exception for the parent; return None if it does not survive the round trip."""
    try:
        dumped = pickle.dumps(error)
        pickle.loads(dumped)
    except Exception:
        return None
    return dumped


@contextlib.contextmanager
def _world(call: WorkerCall) -> Iterator[None]:
    """Join a new world with the state of a fresh process: environment,
    process group and random generator.
    """
    import torch
    import torch.distributed as dist

    before = dict(os.environ)
    os.environ.update(
        RANK=str(call.rank), WORLD_SIZE=str(call.world_size), LOCAL_RANK=str(call.rank)
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(call.store, call.world_size),  # type: ignore[attr-defined]
            rank=call.rank,
            world_size=call.world_size,
            # later than the parent's, which finds the hung rank
            timeout=timedelta(seconds=call.timeout_s + 30),
        )
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _destroy_groups() -> None:
    """Destroy the process groups and collect leftover references: a group has three threads,
    one of which polls.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
