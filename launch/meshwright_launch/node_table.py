"""Table of a run's nodes: connections to their agents, the blocks of ranks on them, and spare ones.

    strangers     connections without a first message
    claims        connections of agents in the place of a node that may be gone
    nodes         the first one, and each whose agent has sent a Hello
    blocks        node of each block of ranks; all others are spare
    lost          nodes of blocks whose agents are gone, until others take their places

The first node always has a block: no step is complete without its ranks. So of a network in two halves, only the
half with the first node goes on.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NamedTuple

from meshwright.system.host import NODE
from meshwright.terminal.output import tell
from meshwright_launch.agent import Agent
from meshwright_launch.node_link import (
    BEAT_S,
    End,
    Hello,
    LinkLost,
    NodeLink,
    NodeMessage,
    Order,
    Stop,
)
from meshwright_launch.node_place import NodePlace
from meshwright_launch.node_ranks import SHUTDOWN_S

HELLO_S = 10.0
"""Time for a connection to send its first message."""
MAX_STRANGERS = 64
"""Most connections without a first message, besides those of the run's nodes."""
TURN_S = 0.02
"""Pause before messages are taken in: those of many nodes together."""


class OwnLink:
    """The coordinator's connection to the agent of its own process: no connection at all."""

    silent_s = 0.0
    num_reads = 0

    def __init__(self, agent: Agent) -> None:
        """Wrap an agent."""
        self.agent = agent

    def send(self, message: NodeMessage) -> None:
        """Carry out an order at once."""
        if isinstance(message, Order):
            self.agent.carry_out(message)
        elif isinstance(message, Stop):
            self.agent.stop()

    def receive(self) -> list[NodeMessage]:
        """Return what has happened to the ranks."""
        return self.agent.take_reports()

    def beat(self) -> None:
        """Send nothing: there is one process."""

    def count_silence(self, turn_s: float) -> None:
        """Count nothing: there is one process."""

    def close(self) -> None:
        """Close nothing: the agent ends with this process."""


class Node(NamedTuple):
    """Node with an agent."""

    number: int
    name: str
    link: NodeLink | OwnLink
    address: str = ""
    """See :class:`Hello`."""


class LostNode(NamedTuple):
    """Loss of a node with ranks."""

    reason: str
    silent_s: float
    """Seconds from its last sign of life until the loss was noticed."""


@dataclass
class Claim:
    """Hello of an agent in the place of a node that is there. It may have come back before its loss was
    noticed: whose connection is alive decides.
    """

    hello: Hello
    link: NodeLink
    rival: Node
    num_reads: int | None = None
    """Reads from the other node when the hello had been taken in; None: this turn."""


class NodeTable:
    """Nodes of a run, seen from the first one."""

    def __init__(
        self, place: NodePlace, own: Node, listener: socket.socket | None, run: str
    ) -> None:
        """Begin with the first node alone.

        Args:
            own: this node.
            listener: socket to which the other agents connect; None: there are none.
            run: what all agents of the run have in common, see :func:`~.agent.digest`.
        """
        self._place, self._listener, self.run = place, listener, run
        self.num_ranks = place.num_ranks
        """Number of ranks on the blocks."""
        self.nodes = {0: own}
        self.blocks: list[int] = []
        """Node of each block of ``ranks_per_node`` ranks."""
        self.lost: dict[int, LostNode] = {}
        """Nodes of blocks that were lost and not replaced yet."""
        self._gone: list[str] = []
        """Addresses of lost nodes, for the next announcement."""
        self._strangers: list[tuple[NodeLink, float]] = []
        """Connections without a first message, and the times when they came."""
        self._claims: list[Claim] = []
        self._turn_s = time.monotonic()

    @property
    def own(self) -> OwnLink:
        """Connection to the agent of this process."""
        link = self.nodes[0].link
        assert isinstance(link, OwnLink)
        return link

    def alive(self) -> list[Node]:
        """Return the nodes whose agents are there."""
        return [each for number, each in self.nodes.items() if number not in self.lost]

    def spares(self) -> list[int]:
        """Return the nodes without ranks, in order."""
        return [number for number in sorted(self.nodes) if number not in self.blocks]

    def missing(self) -> list[int]:
        """Return the nodes whose agents have not come."""
        return [number for number in range(self._place.num_nodes) if number not in self.nodes]

    # -----------------------------------------------------------------------------------------------------
    # ranks on nodes

    def ranks_of(self, number: int) -> list[int]:
        """Return the ranks of a node."""
        if number not in self.blocks:
            return []
        size = self._place.ranks_per_node
        first = self.blocks.index(number) * size
        return list(range(first, min(first + size, self.num_ranks)))

    def node_of(self, rank: int) -> Node:
        """Return the node of a rank."""
        return self.nodes[self.blocks[rank // self._place.ranks_per_node]]

    def names_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the nodes of some ranks."""
        return tuple(dict.fromkeys(self.node_of(rank).name for rank in ranks))

    def replace_lost(self, spares: Sequence[int]) -> list[str]:
        """Put one of these spare nodes in the place of each that is lost; return the names of those
        that were taken. There are enough.
        """
        taken = list(zip(self.lost_blocks(), spares, strict=False))
        for number, spare in taken:
            self.blocks[self.blocks.index(number)] = spare
        self.forget_lost()
        return [self.nodes[spare].name for _, spare in taken]

    def lost_blocks(self) -> list[int]:
        """Return the nodes of blocks that are lost, in the order of the blocks."""
        return [number for number in self.blocks if number in self.lost]

    def forget_lost(self) -> None:
        """Forget the lost nodes, whose places others have taken."""
        for number in self.lost:
            gone = self.nodes.pop(number)
            # several nodes of an address are emulated: that machine resets connections
            if gone.address and all(gone.address != each.address for each in self.nodes.values()):
                self._gone.append(gone.address)
        self.lost.clear()

    def place_ranks(self, nodes: Sequence[int], num_ranks: int) -> None:
        """Put other numbers of ranks on other nodes; the rest become spare, and the lost are forgotten."""
        self.forget_lost()
        self.blocks, self.num_ranks = list(nodes), num_ranks

    def take_gone(self) -> list[str]:
        """Return the addresses of nodes that were lost since the last call."""
        gone, self._gone = self._gone, []
        return gone

    # -----------------------------------------------------------------------------------------------------
    # messages

    def listen(self, limit_s: float) -> list[tuple[Node, NodeMessage]]:
        """Wait for something to happen; return the messages of the nodes. Nodes come and are lost in it."""
        links = [link.connection for link in self._links() if isinstance(link, NodeLink)]
        listener = [] if self._listener is None else [self._listener]
        if wait([*listener, *links, *self.own.agent.sentinels()], limit_s) and limit_s:
            time.sleep(TURN_S)
        before_s, self._turn_s = self._turn_s, time.monotonic()
        self.accept()
        found: list[tuple[Node, NodeMessage]] = []
        for node in self.alive():
            node.link.count_silence(self._turn_s - before_s)
            node.link.beat()
            silent_s = node.link.silent_s
            try:
                found += [(node, message) for message in node.link.receive()]
            except LinkLost as lost:
                self._lose(node, LostNode(str(lost), silent_s))
        for claim in self._claims:
            claim.link.beat()
            if claim.num_reads is None:
                claim.num_reads = claim.rival.link.num_reads
        return found

    def _links(self) -> Iterator[NodeLink | OwnLink]:
        yield from (each.link for each in self.alive())
        yield from (link for link, _ in self._strangers)
        yield from (claim.link for claim in self._claims)

    def _lose(self, node: Node, lost: LostNode) -> None:
        """Note that a node is gone; a spare one is forgotten."""
        node.link.close()
        if node.number in self.blocks:
            self.lost[node.number] = lost
        else:
            del self.nodes[node.number]
            tell(f"meshwright: the spare node {node.name} is gone: {lost.reason}")

    def accept(self) -> None:
        """Accept connections; add the nodes of those that send their first message."""
        most = MAX_STRANGERS + self._place.num_nodes
        while self._listener is not None and wait([self._listener], 0.0):
            try:
                link = NodeLink(self._listener.accept()[0], self._place.num_nodes)
            except OSError:  # no file descriptors are left: the connection waits for the next turn
                break
            self._strangers.append((link, time.monotonic()))
            if len(self._strangers) > most:
                self._dismiss(self._strangers[0])
        for stranger in list(self._strangers):
            link, came_s = stranger
            try:
                first = link.receive_first()
            except LinkLost:
                self._dismiss(stranger)
                continue
            if isinstance(first, Hello):
                self._strangers.remove(stranger)
                self._welcome(first, link)
            elif first is not None or time.monotonic() - came_s > HELLO_S:
                self._dismiss(stranger)
        for claim in list(self._claims):
            self._decide(claim)

    def _decide(self, claim: Claim) -> None:
        """Add the node of a claim once the other one is gone; refuse it once that has sent something."""
        rival = claim.rival
        try:
            claim.link.receive()  # beats
        except LinkLost:
            self._claims.remove(claim)
            claim.link.close()
            return
        if self.nodes.get(rival.number) is not rival:
            self._claims.remove(claim)
            self._welcome(claim.hello, claim.link)
        elif claim.num_reads is not None and rival.link.num_reads > claim.num_reads:
            self._claims.remove(claim)
            self._refuse(claim.hello, claim.link, _why_taken(claim.hello, rival))

    def _dismiss(self, stranger: tuple[NodeLink, float]) -> None:
        self._strangers.remove(stranger)
        stranger[0].close()

    def _welcome(self, hello: Hello, link: NodeLink) -> None:
        """Add the node of an agent, as a spare one if the ranks have started; refuse another run's."""
        rivals = [
            each
            for each in self.nodes.values()
            if hello.node == each.number or hello.name == each.name
        ]
        if hello.run != self.run or not hello.node < self._place.num_nodes:
            why = "its configuration, or its number of nodes, ranks per node or spares, is another"
            self._refuse(hello, link, why)
        elif any(each.number == 0 for each in rivals):
            self._refuse(hello, link, _why_taken(hello, self.nodes[0]))
        elif rivals:
            self._claims.append(Claim(hello, link, rivals[0]))
        else:
            self.nodes[hello.node] = Node(hello.node, hello.name, link, hello.address)

    def _refuse(self, hello: Hello, link: NodeLink, why: str) -> None:
        """Send an agent the reason why it is none of this run, and end the connection."""
        text = (
            f"the agent of {hello.name!r} is refused by that of {self.nodes[0].name}: {why}. Start"
            " the same command on all nodes, with another index on each"
        )
        tell(f"meshwright: {text}")
        link.send(End(exit_code=2, message=text))
        link.close()

    def close(self, exit_code: int) -> None:
        """Send the end of the run to all agents, and wait until they have it."""
        links = [each.link for each in self.alive() if isinstance(each.link, NodeLink)]
        links += [claim.link for claim in self._claims]
        for link in links:
            link.send(End(exit_code=exit_code))
        limit_s = time.monotonic() + 2 * SHUTDOWN_S
        while links and time.monotonic() < limit_s:
            wait([link.connection for link in links], BEAT_S / 10)
            for link in list(links):
                try:
                    link.receive()
                except LinkLost:
                    links.remove(link)
                    link.close()


def _why_taken(hello: Hello, rival: Node) -> str:
    """Return why an agent cannot be a node of the run beside another one."""
    if hello.node == rival.number:
        return f"there is a node {hello.node} already"
    # ranks copy their state to ranks of nodes with another name
    return f"there is a node of this name already (set {NODE} to a name of its own)"


def choose_nodes(ring: Sequence[int | None], alive: Collection[int], count: int) -> list[int]:
    """Return ``count`` of the nodes that are alive, the first node among them, in order: such that all
    shards of the mirror lie on them, if so many suffice.

    Args:
        ring: nodes whose ranks have mirrored the last step, in the order of the ranks; None: one that is
            gone since. Each holds its own shards and those of the node before it.
        alive: in the order in which they are taken.
    """
    chosen = {0}
    following = [*ring[1:], *ring[:1]]
    for node, holder in zip(ring, following, strict=True):
        if node not in chosen and holder not in chosen:
            place = node if holder is None else holder  # the holder has the next shards too
            chosen.update([] if place is None else [place])
    if len(chosen) > count:
        chosen = {0}  # the ranks find that the mirror is not whole, and resume from a checkpoint
    others = [node for node in alive if node not in chosen]
    return sorted([*chosen, *others[: count - len(chosen)]])
