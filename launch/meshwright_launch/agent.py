"""Agent of one node: forks the ranks that the coordinator orders, and reports their ends.

    first node      coordinator --- its own agent, in the same process
                         |
    other nodes          +--------- agent, with ranks
                         +--------- agent of a spare node: no ranks, a warm fork server

An agent that loses the coordinator ends, and its ranks with it: the run goes on nowhere else. The
mirror of the node's ranks in memory lives as long as the agent. No torch.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from meshwright.config import RunConfig
from meshwright.errors import MissingRanksError
from meshwright.system.host import NODE, node_name, own_address
from meshwright_launch.failure import RankFailed
from meshwright_launch.mirror_place import MirrorPlace
from meshwright_launch.node_link import (
    BEAT_S,
    End,
    Exit,
    Failure,
    Hello,
    LinkLost,
    NodeLink,
    NodeMessage,
    Order,
    Signalled,
    Stop,
    Stopped,
)
from meshwright_launch.node_place import NodePlace
from meshwright_launch.node_ranks import UNKNOWN_EXIT, NodeRanks
from meshwright_launch.rank import LocalRank

COORDINATOR_LOST = 94
"""Exit code of an agent that has lost the first node."""
CONNECT_PAUSE_S = 0.2


class Agent:
    """Ranks of this node, as the coordinator orders them."""

    def __init__(self, ranks: NodeRanks, mirror: MirrorPlace, place: NodePlace) -> None:
        """Begin without a rank."""
        self._ranks = ranks
        self._mirror = mirror
        self._place = place
        self._unstarted: list[NodeMessage] = []
        self._has_told = False
        """Flag: a signal was reported."""

    def sentinels(self) -> list[int]:
        """Return what changes when a rank ends."""
        return self._ranks.sentinels()

    def carry_out(self, order: Order) -> None:
        """Kill and fork processes. A rank that cannot be forked is reported as ended."""
        # a restart too has steps in memory; a node without ranks has none to save
        is_recovering = bool(order.ranks) and (order.is_recovery or order.generation > 0)
        with self._ranks.signals.changing(is_recovering):
            self._replace(order)

    def _replace(self, order: Order) -> None:
        if not order.is_recovery:
            self._ranks.warm_up()
        leaving = set(self._ranks.held()).difference(order.ranks)
        self._ranks.kill(leaving.union(order.begin))
        if order.clears:
            self._mirror.clear()
        path = str(self._mirror.open())
        for rank in order.begin:
            on_node = order.ranks.index(rank), len(order.ranks)
            host, port = self._place.host, order.port
            rank_place = LocalRank(
                rank, order.num_ranks, host, port, order.generation, path, on_node
            )
            try:
                self._ranks.start(rank_place)
            except RankFailed as error:
                self._unstarted.append(_never_started(rank_place, error))

    def stop(self) -> None:
        """End all ranks; those that can are given time to."""
        self._ranks.end()

    def take_reports(self) -> list[NodeMessage]:
        """Return what has happened to the ranks since the last call."""
        signals = self._ranks.signals
        signals.forward_kept()
        reports, self._unstarted = self._unstarted, []
        reports += [Exit.pack(ended) for ended in self._ranks.take_exits()]
        if signals.has_forwarded and not self._has_told:
            self._has_told = True
            reports.append(Signalled())
        return reports

    def poll_s(self) -> float:
        """Return the seconds in which to call :meth:`take_reports` without an event."""
        return BEAT_S if self._ranks.signals.all_listen() else BEAT_S / 4


def serve(agent: Agent, link: NodeLink) -> tuple[int, str]:
    """Carry out the coordinator's orders until the run ends; return its exit code, and a message
    that is not the run's own.
    """
    turn_s = time.monotonic()
    while True:
        wait([link.connection, *agent.sentinels()], agent.poll_s())
        before_s, turn_s = turn_s, time.monotonic()
        link.count_silence(turn_s - before_s)
        for report in agent.take_reports():
            link.send(report)
        link.beat()
        try:
            messages = link.receive()
        except LinkLost as lost:
            return COORDINATOR_LOST, (
                f"the agent of the first node is gone: {lost}. The ranks of this node are ended; the"
                " same command resumes the run"
            )
        for message in messages:
            if isinstance(message, End):
                return message.exit_code, message.message
            _obey(agent, link, message)


def _obey(agent: Agent, link: NodeLink, message: NodeMessage) -> None:
    if isinstance(message, Stop):
        agent.stop()
        for report in agent.take_reports():
            link.send(report)
        link.send(Stopped())
    elif isinstance(message, Order):
        agent.carry_out(message)


def _never_started(place: LocalRank, error: RankFailed) -> Exit:
    """Return the report of a rank whose fork server has ended."""
    failure = Failure(
        message=str(error), trace="", exit_code=error.exit_code, lost_peer=False, age_s=0.0
    )
    return Exit(rank=place.rank, generation=place.generation, code=UNKNOWN_EXIT, failure=failure)


@contextmanager
def joined(config: RunConfig, place: NodePlace) -> Iterator[NodeLink]:
    """Connect this node's agent to the coordinator, once it is ready to fork ranks.

    Raises:
        MissingRanksError: the first node cannot be reached within ``launch.timeout_s``.
    """
    limit_s = time.monotonic() + config.launch.timeout_s
    while True:
        try:
            connection = socket.create_connection((place.host, place.port), config.launch.timeout_s)
            break
        except OSError as error:
            if time.monotonic() > limit_s:
                raise MissingRanksError(
                    "MW-LAUNCH-119",
                    f"{node_name()} cannot reach the agent of the first node at"
                    f" {place.host}:{place.port}: {error.strerror or error}. Look at the network of"
                    f" {node_name()} and of {place.host}; another port: MASTER_PORT",
                ) from None
            time.sleep(CONNECT_PAUSE_S)
    link = NodeLink(connection, place.num_nodes)
    try:
        name = node_name()[:255]
        address = own_address(place.host) or ""
        link.send(Hello(node=place.number, name=name, run=digest(config, place), address=address))
        yield link
    finally:
        link.close()


def digest(config: RunConfig, place: NodePlace) -> str:
    """Return what all agents of a run have in common."""
    shared = f"{config.model_dump_json()} {place.num_nodes} {place.num_ranks} {place.num_spares}"
    return hashlib.sha256(shared.encode()).hexdigest()


def name_node() -> None:
    """Give this process's ranks the name under which its agent reports them."""
    os.environ[NODE] = node_name()
