"""Process of one local rank, forked for the launcher: setup, work and end.

A failing rank writes a record with the time and the reason. A rank that fails because it lost a
peer lingers, so that the launcher notices the peer first and shows the cause instead of its echo.
Every rank dies with its launcher.
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
from meshwright.system.host import interface_towards, is_loopback, loopback
from meshwright.system.process import LISTENING, SIGNALS, GiveUp, ignore_signals, leave
from meshwright.terminal.output import make_printable, tell
from meshwright_launch.failure import LOG_HEAD, FailureRecord, describe, write_failure
from meshwright_launch.forking import die_with_parent

GENERATION = "MESHWRIGHT_GENERATION"
"""Environment variable with the number of the launch of this run's ranks; set where the launcher
recovers in place.
"""
MIRROR = "MESHWRIGHT_MIRROR"
"""Environment variable with the directory of the mirror in memory."""

Work = Callable[[RunConfig, GiveUp], None]
"""Function that a rank runs, given its configuration and a function that ends the process
if the main thread hangs.
"""

LINGER_S = 3.0
"""Time that a rank lingers after it lost a peer,
so that the launcher notices the lost peer first.
"""
DUPLICATE_ERROR_DELAY_S = 30.0
"""Delay before a rank prints an error that another rank of its node prints at once;
usually it is ended before.
"""


class LocalRank(NamedTuple):
    """Rank of a node, and the address of the rendezvous store that a launcher serves."""

    rank: int
    world_size: int
    host: str
    port: int
    generation: int = 0
    """Number of this launch of the ranks; see ``recovery.py``."""
    mirror: str | None = None
    """Directory of the mirror in memory; None: the launcher does not recover in place."""
    on_node: tuple[int, int] | None = None
    """Rank on its node, and number of ranks there; None: there is one node."""

    def variables(self) -> dict[str, str]:
        """Return the environment of ``torch.distributed`` for a client of the launcher's store."""
        local_rank, local_size = self.on_node or (self.rank, self.world_size)
        found = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "local",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **self._interfaces(),
        }
        if self.mirror is not None:
            found |= {GENERATION: str(self.generation), MIRROR: self.mirror}
        return found

    def _interfaces(self) -> dict[str, str]:
        """Return the network interface of gloo and NCCL. A run of one machine uses the loopback,
        whatever the user's shell has set for a cluster.
        """
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if is_loopback(self.host):
            return dict.fromkeys(names, loopback())
        interface = interface_towards(self.host)
        return {name: interface for name in names if interface and not os.environ.get(name)}


def run_rank(
    work: Work,
    config: RunConfig,
    logs: str,
    records: str,
    ignored: list[signal.Signals],
    place: LocalRank,
) -> None:
    """Run one rank in its own process.

    Args:
        logs: Directory of the ranks' logs.
        records: Directory of failure records and of the marks of installed signal handlers.
        ignored: Signals that the launcher was started to ignore.
    """
    _die_with_launcher()
    # default action until the rank installs its handlers (meshwright.system.process)
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)
    # the fork server blocks all, and this process inherits that
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ[LISTENING] = str(Path(records) / "listening")
    rank = place.rank
    os.environ.update(place.variables())
    if rank != 0:
        _redirect(Path(logs) / f"rank-{rank}.log")
    make_printable()
    faulthandler.enable()
    try:
        set_threads(config.launch.threads)
        work(config, partial(_end_rank, rank, Path(records)))
    except Preempted as error:
        # exit code 0: after a failure the launcher would end the other ranks at once
        if not _report(describe(error, rank), Path(records)):
            leave(error.exit_code)
    except BaseException as error:
        _end_rank(rank, Path(records), error)
    finally:
        ignore_signals()  # the rank is exiting and has reported everything


def _report(failure: FailureRecord, records: Path) -> bool:
    """Write the failure record for the launcher, and on ranks other than 0 the error to the log.

    Return False if the record cannot be written, for example because the temporary directory is
    full. The launcher then has only the exit code.
    """
    is_written = True
    try:
        write_failure(failure, records)
    except OSError as error:
        is_written = False
        tell(f"no record of this failure can be written to {records}: {error.strerror}")
    if failure.rank != 0 or not is_written:
        tell(failure.trace or failure.message)
    return is_written


def _end_rank(rank: int, records: Path, error: BaseException) -> None:
    """Report the error and end this process."""
    failure = describe(error, rank)
    _report(failure, records)
    leave(failure.exit_code, LINGER_S if failure.lost_peer else 0.0)


def set_threads(num_threads: int) -> None:
    """Set the number of CPU threads of this rank,
    even if torch was imported before OMP_NUM_THREADS was set.
    """
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch

    torch.set_num_threads(num_threads)


def _die_with_launcher() -> None:
    """Kill this process when the fork server or the launcher dies."""
    _close_server_pipe()
    die_with_parent(os.getppid())  # the fork server
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


def _close_server_pipe() -> None:
    """Close this rank's copy of the pipe that keeps the fork server alive.

    The server lives as long as any process has an end of that pipe open, and Python passes it to
    each child. A stopped rank would keep the server alive, and with it itself, after the launcher
    is gone. A rank that starts processes through a fork server gets a server of its own.
    """
    server: Any = forkserver._forkserver
    alive_fd = getattr(server, "_forkserver_alive_fd", None)
    if alive_fd is not None:
        os.close(alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None


def _redirect(log: Path) -> None:
    """Append the output of this process, also from C++, to a file."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    print(f"{LOG_HEAD}{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} ===", flush=True)
