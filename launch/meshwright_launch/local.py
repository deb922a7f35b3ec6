"""Launcher of the ranks of one machine: starts them, and ends all after the first failure.

    meshwright train ---- store at 127.0.0.1      process group rendezvous; nothing in it is unpickled
          |
    node_ranks.py ---- fork server ---- ranks     0.1 s each instead of an import of torch each

Every socket of a local run listens on the loopback interface (docs/security.md). torch's elastic
agent is not used: its store listens on all interfaces, and the agent unpickles what any client
writes there.

With ``watch.mirror`` a coordinator (coordinator.py) watches the ranks instead, and replaces dead ones.
"""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import wait
from typing import Any

from meshwright.config import Launch, RunConfig
from meshwright.errors import ConfigError, MeshError
from meshwright.system.process import end_process
from meshwright_launch.environment import check_port
from meshwright_launch.failure import RankFailed, build_error, describe
from meshwright_launch.node_ranks import (
    UNKNOWN_EXIT,
    NodeRanks,
    RankExit,
    make_logs,
    open_ranks,
    server_gone,
)
from meshwright_launch.rank import LocalRank, Work, set_threads

LOOPBACK = "127.0.0.1"
MAX_RANKS = 1024
POLL_S = 1.0
"""Interval in seconds in which the launcher looks for signal handlers of ranks,
until all have one.
"""


def has_children(launch: Launch) -> bool:
    """Return True if ranks run in child processes;
    a single rank does only if it may have to be restarted.
    """
    return launch.processes != 1 or launch.max_restarts > 0


def launch(work: Work, config: RunConfig) -> None:
    """Run ``work(config, give_up)`` in ``config.launch.processes`` ranks of this machine;
    block until all have ended.

    ``config`` is resolved. ``work`` is pickled by name. A single rank runs in this process, unless
    it may have to be restarted.

    Raises:
        MeshError: the port in MASTER_PORT is taken, or the launcher cannot listen on loopback.
        ConfigError: too many ranks, or the log directory cannot be written.
        RankFailed: a rank raised or died; has its message and those of later failures. Also if the
            fork server ended. With exit code 85: all ranks have saved and exited after a signal.
        Interrupted: a signal arrived before all ranks could save.
    """
    num_ranks = check_number(config)
    if not has_children(config.launch):
        set_threads(config.launch.threads)
        try:
            work(config, end_process)
        except (SystemExit, BrokenPipeError) as error:
            # from user code: treated as from a rank in its own process
            failure = describe(error, 0)
            raise RankFailed(f"rank 0: {failure.message}\n{failure.trace}", 0) from None
        return
    make_logs(config)
    port = rendezvous_port()
    with open_ranks(work, config) as ranks:
        # kept: the store ends with the object
        _store, bound = open_store(listen_on_loopback(port), LOOPBACK, num_ranks)
        try:
            for rank in range(num_ranks):
                ranks.start(LocalRank(rank, num_ranks, LOOPBACK, bound))
            _wait_for_all(ranks)
        except RankFailed as failed:
            failed.is_requested = ranks.signals.has_forwarded
            raise


def check_number(config: RunConfig) -> int:
    """Return the number of ranks of a resolved configuration that run on one machine.

    Raises:
        ConfigError: they are too many.
    """
    num_ranks = config.launch.processes
    assert isinstance(num_ranks, int), "resolve the configuration first"
    if num_ranks > MAX_RANKS:
        raise ConfigError(
            "MW-LAUNCH-033",
            f"{num_ranks:,} ranks on this machine: at most {MAX_RANKS:,} are started here. Lower a"
            " degree, or use several nodes (`meshwright slurm`)",
        )
    return num_ranks


def _wait_for_all(ranks: NodeRanks) -> None:
    """Block until all ranks have exited, or until one has failed and the others were ended after
    it.

    Raises:
        RankFailed: a rank failed, all have saved and exited on request, or the fork server was
            killed, and the ranks with it.
    """
    while sentinels := ranks.sentinels():
        wait(sentinels, None if ranks.signals.all_listen() else POLL_S)
        failed = [each for each in ranks.take_exits() if each.code]
        if failed:
            ranks.end()
            raise _error_of(failed[0], ranks)
    for record in ranks.failures():  # no rank failed: all have saved and exited on request
        raise RankFailed(record.message, record.rank, record.exit_code)


def _error_of(first: RankExit, ranks: NodeRanks) -> RankFailed:
    """Return the error of a run; ``first``: the rank that was seen to end first."""
    failures = ranks.failures()
    if not failures and first.code == UNKNOWN_EXIT:
        return server_gone("and all ranks with it", first.rank)
    return build_error(first.rank, first.code, failures, ranks.logs)


def rendezvous_port() -> int:
    """Return the port in MASTER_PORT if the user has set one, else 0 for any free port."""
    text = os.environ.get("MASTER_PORT", "")
    return check_port(text) if text else 0


def listen_on_loopback(port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1 only.

    Raises:
        MeshError: the port is taken.
    """
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise MeshError(
            "MW-LAUNCH-035",
            f"the launcher cannot listen at {LOOPBACK}, port {port or 'any'}: {error.strerror}. Set"
            " MASTER_PORT to a free port",
        ) from None


def open_store(listener: socket.socket, host: str, num_ranks: int) -> tuple[Any, int]:
    """Serve the ranks' rendezvous store from this process; return it and its port.

    torch's own TCPStore would listen on all interfaces, so it is given a socket that is already
    bound.
    """
    import torch.distributed as dist

    bound = listener.getsockname()[1]
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        host, bound, num_ranks, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, bound
