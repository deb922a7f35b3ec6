"""Training whose dead ranks are replaced in place (``watch.mirror``), on one node or several.

    meshwright train, on the first node     coordinator, and the agent of this node
    meshwright train, on each other one     agent

The first node serves two sockets, at the address of MASTER_ADDR: that of the agents, at MASTER_PORT,
and the ranks' rendezvous store, at a free port. A run of one node has the second alone, on the loopback.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.config import RunConfig, resolve
from meshwright.errors import MeshError
from meshwright.run import RunLock
from meshwright.run.directory import run_directory
from meshwright.system.host import node_name, open_listener, own_address
from meshwright.system.process import GiveUp
from meshwright.terminal.output import put, tell
from meshwright_launch import devices, forking, restarts
from meshwright_launch.agent import Agent, digest, joined, name_node, serve
from meshwright_launch.local import LOOPBACK, check_number, listen_on_loopback, rendezvous_port
from meshwright_launch.local import open_store as open_ranks_store
from meshwright_launch.mirror_place import MirrorPlace
from meshwright_launch.node_place import NodePlace
from meshwright_launch.node_ranks import make_logs, open_ranks

if TYPE_CHECKING:
    from meshwright_launch.coordinator import Coordinator

EXIT_FILE = "MESHWRIGHT_EXIT_FILE"
"""Environment variable with a file for the exit code of the run: srun returns the highest code of
all agents, lost ones too.
"""
MAX_FILES = 65_536
"""Open files that the first node's agent asks for, if the system allows as many."""
WORK = "meshwright_launch.work"
"""Module that the fork server imports."""


def run_work(config: RunConfig, give_up: GiveUp) -> None:
    """Run one rank. Pickled by name: an agent needs no torch for itself."""
    from meshwright_launch.work import work

    work(config, give_up)


def train(config: RunConfig, place: NodePlace | None) -> int:
    """Train as the agent of this node; return the exit code. ``place``: None for one machine.

    Raises:
        UserError: the run cannot start.
        RankFailed: the run has failed, or all ranks have saved and exited on request.
        Interrupted: a signal arrived before all ranks could save.
    """
    if place is None:
        place = NodePlace(0, 1, devices.num_local_ranks(config))
    elif place.num_nodes > 1:
        name_node()
        check_devices(config, place)
    if place.number > 0:
        return _follow(config, place)
    try:
        _coordinate(config, place)
    except BaseException as error:
        _leave_exit_code(_exit_code_of(error))
        raise
    _leave_exit_code(0)
    return 0


def check_devices(config: RunConfig, place: NodePlace) -> None:
    """Check that this node has a device for each of its ranks.

    Raises:
        MeshError: it has fewer.
    """
    found = devices.num_devices(config.launch, config.train.device)
    if 0 < found < place.ranks_per_node and not config.launch.share_devices:
        raise MeshError(
            "MW-LAUNCH-121",
            f"{node_name()} has {found} device{'s' * (found > 1)}, and the run wants"
            f" {place.ranks_per_node} ranks on each node: set MESHWRIGHT_NPROC_PER_NODE to at most"
            f" {found}",
        )


def _coordinate(config: RunConfig, place: NodePlace) -> None:
    """Run the coordinator and the agent of the first node until the run ends."""
    directory = run_directory(config.run)
    RunLock(directory).check_free()  # before seconds of imports; rank 0 takes it
    forking.warm_up(config, WORK)
    from meshwright_launch.work import check

    _allow_files()
    checked, _ = check(config, place.num_ranks, place.ranks_per_node)
    if place.num_nodes == 1:
        check_number(checked)
    with contextlib.suppress(OSError):  # a closed stdout does not stop the training
        put(_describe(place), flush=True)
    mirror = MirrorPlace()
    with _opened(checked, place, mirror) as coordinator:
        restarts.run_with_restarts(
            coordinator.launch,
            checked.launch.max_restarts,
            directory,
            lambda text: tell(f"meshwright: {text}"),
            mirror.newest_step,
        )


def _allow_files() -> None:
    """Raise the limit of open files: each node, each rank and each connection to the store has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _describe(place: NodePlace) -> str:
    """Return the line of a start."""
    ranks = f"{place.num_ranks} rank{'s' * (place.num_ranks != 1)}"
    if place.num_nodes == 1:
        return f"starting {ranks} on this machine"
    num_nodes = place.num_nodes - place.num_spares
    spares = f", {place.num_spares} spare" if place.num_spares else ""
    return f"starting {ranks} on {num_nodes} node{'s' * (num_nodes > 1)} of {place.ranks_per_node}{spares}"


@contextlib.contextmanager
def _opened(config: RunConfig, place: NodePlace, mirror: MirrorPlace) -> Iterator[Coordinator]:
    """Open the sockets and the agent of the first node."""
    from meshwright_launch.coordinator import Coordinator
    from meshwright_launch.node_table import Node, NodeTable, OwnLink

    mirror.open()  # or refuse it, before the ranks start
    make_logs(config)
    with contextlib.ExitStack() as stack:
        listener = None
        if place.num_nodes == 1:
            store_listener = listen_on_loopback(rendezvous_port())
        else:
            listener = stack.enter_context(_listen(place.host, place.port))
            store_listener = _listen(place.host, 0)
        ranks = stack.enter_context(open_ranks(run_work, config, WORK))
        host = LOOPBACK if place.num_nodes == 1 else place.host
        store = open_ranks_store(store_listener, host, place.num_ranks)
        agent = Agent(ranks, mirror, place)
        own = Node(0, node_name(), OwnLink(agent), own_address(place.host) or "")
        table = NodeTable(place, own, listener, digest(config, place))
        coordinator = Coordinator(config, place, table, store, mirror)
        try:
            yield coordinator
        except BaseException as error:
            coordinator.close(_exit_code_of(error))
            raise
        coordinator.close(0)


def _exit_code_of(error: BaseException) -> int:
    code: int = getattr(error, "exit_code", 1)
    return code


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address of ``host``, and at no other if that can be
    determined.

    Raises:
        MeshError: the port is taken, or the address is not this node's.
    """
    try:
        listener = open_listener(host, port)
        return (
            socket.create_server(("", port), backlog=socket.SOMAXCONN)
            if listener is None
            else listener
        )
    except OSError as error:
        raise MeshError(
            "MW-LAUNCH-122",
            f"the agent of the first node, {node_name()}, cannot listen at {host}:{port}:"
            f" {error.strerror or error}. MASTER_ADDR must be this node, and MASTER_PORT free on it",
        ) from None


def _leave_exit_code(code: int) -> None:
    """Write the exit code of the run to EXIT_FILE, if set."""
    if file := os.environ.get(EXIT_FILE):
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{code}\n", encoding="ascii")


def _follow(config: RunConfig, place: NodePlace) -> int:
    """Run the agent of another node until the run ends; return its exit code."""
    resolved = resolve(config, place.num_ranks)
    mirror = MirrorPlace()
    mirror.open()
    make_logs(resolved)
    with open_ranks(run_work, resolved, WORK) as ranks, joined(resolved, place) as link:
        code, message = serve(Agent(ranks, mirror, place), link)
    if message:
        tell(f"meshwright: error: {message}")
    return code
