"""Links between the ranks of a group: seconds of its messages,
and rings that are slower the longer they are.

A network congests: many rings share its switches, and several devices a node's adapter. A hardware
file may therefore have rates by length, measured while all rings of that length run at once
(``node_rings``, ``cluster_rings``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from meshwright_plan.planner.hardware import Link, Ring


class GroupLink(NamedTuple):
    """Links between the ranks of one group in one layout."""

    bytes_per_s: float
    ring_s: float
    """Latency of one round of the ring, in seconds."""
    size: int
    call_s: float = 0.0
    """Start-up seconds of each message."""
    measured: tuple[tuple[str, Link], ...] = ()
    """Measured links by kind of message; empty if none were measured."""

    def seconds(self, wire_bytes: float, calls: float = 1, kind: str = "") -> float:
        """Return the seconds of ``calls`` messages of one kind;
        ``wire_bytes`` is their total per rank.

        An all-gather or reduce-scatter goes once around a ring of any length. An all-reduce goes
        around twice or, among many ranks, up and down a tree (NCCL's choices).
        """
        if self.size == 1:
            return 0.0
        for name, link in self.measured:
            if name == kind:
                hops = 1 if kind == "send" else (self.size - 1) * (2 if kind == "all_reduce" else 1)
                return wire_bytes / link.bytes_per_s + calls * hops * link.latency_s
        latency = self.ring_s
        if kind == "all_reduce":
            latency *= rounds(self.size)
        return wire_bytes / self.bytes_per_s + calls * (latency + self.call_s)


class ReachedLinks(NamedTuple):
    """Rates that the ranks of a group reach, inside a node and between nodes."""

    node_bytes_per_s: float
    node_latency_s: float
    cluster_bytes_per_s: float
    """Rate of one device's network link."""
    cluster_latency_s: float
    call_s: float
    """Start-up seconds of each message; 0 with measured rings, whose latency has it."""


class Spread(NamedTuple):
    """Spread of equal groups over nodes, or over domains of linked devices."""

    fewest: int
    """Fewest members of a group in one of its nodes; all of them if no group leaves its node."""
    nodes: int
    """Largest number of nodes of a group."""


@lru_cache(maxsize=2**14)
def spread_of(size: int, stride: int, linked: int, num_ranks: int | None = None) -> Spread:
    """Return how groups of ``size`` ranks, ``stride`` ranks apart,
    spread over nodes of ``linked`` devices.

    The groups tile all ``num_ranks`` ranks (None: any number), so that some begin inside a node. A
    ring waits for its slowest link: of the groups that cross nodes, the one with the fewest members
    in a node counts.
    """
    period = math.lcm(size * stride, linked)
    starts = range(
        0, period if num_ranks is None else min(period, max(num_ranks, 1)), size * stride
    )
    if stride >= linked:
        return Spread(1, size)
    offsets, step, slots = range(stride), stride, linked
    if linked % stride == 0:  # neighbours of an offset share a node or leave it together
        offsets, starts, step, slots = (
            range(1),
            range(0, len(starts) * size, size),
            1,
            linked // stride,
        )
    fewest, most = size, 1
    for first in (start + offset for start in starts for offset in offsets):
        if step == 1:
            head, last = min(size, slots - first % slots), (first + size - 1) % slots + 1
            members, nodes = min(head, last), (first + size - 1) // slots - first // slots + 1
        else:
            counts = Counter((first + index * step) // slots for index in range(size))
            members, nodes = min(counts.values()), len(counts)
        if nodes > 1:
            fewest, most = min(fewest, members), max(most, nodes)
    return Spread(fewest, most)


def leaves_node(source: int, target: int, ranks: int, linked: int) -> bool:
    """Return True if any of ``ranks`` messages, from rank ``source`` + i to ``target`` + i,
    goes to another node.
    """
    return any(
        (source + index) // linked != (target + index) // linked
        for index in range(min(ranks, linked))
    )


def rounds(size: int) -> float:
    """Return the latency of an all-reduce in rounds of its ring: 2, or less for many ranks,
    where NCCL uses a tree.
    """
    return min(2.0, 4.0 * math.log2(size) / (size - 1))


def ring_link(rings: Sequence[Ring], size: int) -> Link:
    """Return the link of a ring of ``size``: between measured lengths by their logarithm,
    beyond them the nearest's.
    """
    if size <= rings[0].size:
        return rings[0]
    for shorter, longer in pairwise(rings):
        if size <= longer.size:
            share = math.log(size / shorter.size) / math.log(longer.size / shorter.size)
            seconds_per_byte = (1 - share) / shorter.bytes_per_s + share / longer.bytes_per_s
            latency_s = (1 - share) * shorter.latency_s + share * longer.latency_s
            return Link(bytes_per_s=1 / seconds_per_byte, latency_s=latency_s)
    return rings[-1]


def of_ring(messages: Sequence[tuple[str, Link]], share: float) -> tuple[tuple[str, Link], ...]:
    """Return links of messages, measured over one ring,
    for another that reaches ``share`` of its rate.
    """
    return tuple(
        (
            kind,
            link
            if kind == "send"
            else Link(bytes_per_s=link.bytes_per_s * share, latency_s=link.latency_s),
        )
        for kind, link in messages
    )
