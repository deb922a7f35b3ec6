"""The rank's side of a launch: the life of a process that the launcher has forked, and its end.

A rank that fails writes down when and why. One that fails because it lost a peer lingers, so that the launcher first
notices the peer: what is shown is the cause and not its echo. It dies with its launcher.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.config import RunConfig
from meshwright.errors import Preempted
from meshwright.launch.failure import LOG_HEAD, Failure, describe, write_down
from meshwright.launch.forking import die_with, loopback
from meshwright.system.process import GiveUp, leave
from meshwright.system.signals import LISTENING, SIGNALS
from meshwright.terminal.output import tell

Work = Callable[[RunConfig, GiveUp], None]
"""What a rank does: given its configuration, and what ends its process when its main thread may be stuck for good."""

HOLD_S = 3.0
"""How long a rank that lost a peer lingers: the launcher must notice the lost one first."""
SILENT_S = 30.0
"""How long a rank keeps to itself what another one of its node says too: it is ended before, or speaks after all."""


class Place(NamedTuple):
    """Which rank of a local run this is, and where the launcher's store listens."""

    rank: int
    world_size: int
    host: str
    port: int

    def variables(self) -> dict[str, str]:
        """Environment of ``torch.distributed`` for a rank that is a client of its launcher's store.

        All of the run's sockets go to the loopback interface, whatever the user's shell has set for a cluster.
        """
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "local",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": loopback(),
            "NCCL_SOCKET_IFNAME": loopback(),
        }


def run_rank(
    work: Work, config: RunConfig, logs: str, notes: str, unwanted: list[signal.Signals], place: Place
) -> None:
    """The life of one rank, in its own process. ``unwanted``: the signals that the launcher was started to ignore."""
    _die_with_launcher()
    for each in SIGNALS:  # DFL until it listens (meshwright.system.signals)
        signal.signal(each, signal.SIG_IGN if each in unwanted else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the server that it was forked from blocks all
    os.environ[LISTENING] = str(Path(notes) / "listening")
    rank = place.rank
    os.environ.update(place.variables())
    if rank != 0:
        _redirect(Path(logs) / f"rank-{rank}.log")
    faulthandler.enable()
    try:
        set_threads(config.launch.threads)
        work(config, partial(_end_rank, rank, Path(notes)))
    except BaseException as error:
        if isinstance(error, Preempted):  # no failure to the launcher, which would end the others: it waits for all
            _tell(error, rank, Path(notes))
            return
        _end_rank(rank, Path(notes), error)
    finally:
        for each in SIGNALS:  # on its way out, with all that it had to say said
            signal.signal(each, signal.SIG_IGN)


def _tell(error: BaseException, rank: int, notes: Path) -> Failure:
    failure = describe(error, rank)
    write_down(failure, notes)
    if rank != 0:
        tell(failure.trace or failure.message)
    return failure


def _end_rank(rank: int, notes: Path, error: BaseException) -> None:
    """Leave a note for the launcher, and end this process."""
    failure = _tell(error, rank, notes)
    leave(failure.exit_code, HOLD_S if failure.lost_peer else 0.0)


def set_threads(num_threads: int) -> None:
    """Threads of this rank, also when torch was imported before OMP_NUM_THREADS could be set."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch

    torch.set_num_threads(num_threads)


def _die_with_launcher() -> None:
    _let_go_of_server()
    die_with(os.getppid())  # the fork server
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


def _let_go_of_server() -> None:
    """The fork server lives as long as somebody holds the end of a pipe, and Python hands it to each child: a rank that
    is stopped would keep the server alive, and with it itself, when the launcher is gone. What a rank starts by this
    way gets a server of its own.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    held = getattr(server, "_forkserver_alive_fd", None)
    if held is not None:
        os.close(held)
        server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None


def _redirect(log: Path) -> None:
    """Send everything that this process prints, also from C++, to the end of a file."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    print(f"{LOG_HEAD}{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} ===", flush=True)
