"""Links between the ranks of a group: seconds of its messages, and rings that are slower the longer they are.

A network congests: many rings share its switches, and several devices a node's adapter. A hardware file may therefore
have rates by length, measured while all rings of that length run at once (``node_rings``, ``cluster_rings``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from meshwright.tools.planner.hardware import Link, Ring


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
        """Return the seconds of ``calls`` messages of one kind; ``wire_bytes`` is their total per rank.

        An all-gather or reduce-scatter goes once around a ring of any length. An all-reduce goes around twice or, among
        many ranks, up and down a tree (NCCL's choices).
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


def rounds(size: int) -> float:
    """Return the latency of an all-reduce in rounds of its ring: 2, or less for many ranks, where NCCL uses a tree."""
    return min(2.0, 4.0 * math.log2(size) / (size - 1))


def ring_link(rings: Sequence[Ring], size: int) -> Link:
    """Return the link of a ring of ``size``: between measured lengths by their logarithm, beyond them the nearest's."""
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
    """Return links of messages, measured over one ring, for another that reaches ``share`` of its rate."""
    return tuple(
        (kind, link if kind == "send" else Link(bytes_per_s=link.bytes_per_s * share, latency_s=link.latency_s))
        for kind, link in messages
    )
