"""Bandwidth and latency between nodes: ping-pong between pairs of ranks,
and all-reduces along each axis.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from meshwright.mesh import Axis
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh

LATENCY_REPEATS = 20
TARGET_S = 0.25
"""Intended duration of one bandwidth measurement: long compared with a latency,
short for the user.
"""
FIRST_BYTES, MAX_BYTES = 2**20, 2**28
REPEATS = 3
SUMMED_BYTES = 2**22
"""Bytes of a measured all-reduce."""
MAX_ROUNDS = 6
"""Largest number of rounds over pairs of nodes; in each round every node has one partner."""


class LinkMeasurement(NamedTuple):
    """Measured link between two nodes, or between two ranks of one node."""

    nodes: tuple[str, str]
    ranks: tuple[int, int]
    bytes_per_s: float
    """One-way bandwidth of large messages."""
    latency_s: float
    """One-way latency of 8 bytes."""


class AllReduceTiming(NamedTuple):
    """Measured all-reduce of one group."""

    axis: str
    ranks: tuple[int, ...]
    seconds: float
    bus_bytes_per_s: float
    """Bytes that each rank sends per second:
    2 ``SUMMED_BYTES`` (n-1)/n per all-reduce (NCCL's bus bandwidth).
    """
    latency_s: float
    """Seconds of an all-reduce of 8 bytes."""

    def latency_share(self, num_bytes: int) -> float:
        """Return the share of an all-reduce's time that is latency, for ``num_bytes`` bytes."""
        return self.latency_s / (self.latency_s + num_bytes * self._seconds_per_byte)

    def bytes_for(self, share: float) -> int:
        """Return the smallest number of bytes for which latency is ``share``
        of an all-reduce's time.
        """
        return math.ceil(self.latency_s * (1 / share - 1) / self._seconds_per_byte)

    @property
    def _seconds_per_byte(self) -> float:
        return max(self.seconds - self.latency_s, 1e-3 * self.seconds) / SUMMED_BYTES


def rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield rounds of pairs by the circle method: every pair occurs once,
    and no name twice in a round.
    """
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def measure_links(mesh: Mesh) -> list[LinkMeasurement]:
    """Measure pairs of nodes through their first ranks, round by round,
    and one pair of ranks inside each node.

    Every rank calls it and gets the same list; blocks. Each pair exchanges messages of 8 bytes up
    to ``MAX_BYTES``.
    """
    first: dict[str, list[int]] = {}
    for rank, node in enumerate(mesh.nodes):
        first.setdefault(node, []).append(rank)
    across = [[(first[a][0], first[b][0]) for a, b in pairs] for pairs in rounds(list(first))][
        :MAX_ROUNDS
    ]
    inside = [[(ranks[0], ranks[1]) for ranks in first.values() if len(ranks) > 1]]
    found: list[LinkMeasurement] = []
    for pairs in [*inside, *across]:
        mine: LinkMeasurement | None = None
        mesh.world.barrier()
        for pair in pairs:
            if mesh.rank in pair:
                measured = _measure(mesh.world, pair, mesh.device)
                if mesh.rank == pair[0]:
                    mine = LinkMeasurement(
                        (mesh.nodes[pair[0]], mesh.nodes[pair[1]]), pair, *measured
                    )
        found += [
            link for link in mesh.world.gather_objects(mine, LinkMeasurement) if link is not None
        ]
    return found


def _measure(world: Group, pair: tuple[int, int], device: torch.device) -> tuple[float, float]:
    """Return (bytes per second, seconds of latency) of a pair: half a round trip,
    timed on the calling rank.
    """
    leads, peer = world.rank == pair[0], pair[1] if world.rank == pair[0] else pair[0]
    latency_s = (
        statistics.median(_time_round_trips(world, peer, leads, 8, LATENCY_REPEATS, device)) / 2
    )
    probe_s = min(_time_round_trips(world, peer, leads, FIRST_BYTES, REPEATS, device)) / 2
    wanted = torch.tensor(
        [min(max(int(FIRST_BYTES * TARGET_S / probe_s), FIRST_BYTES), MAX_BYTES)], device=device
    )
    _transfer(world, peer, leads, wanted)
    num_bytes = int(wanted.item())
    passed_s = min(_time_round_trips(world, peer, leads, num_bytes, REPEATS, device)) / 2
    return num_bytes / passed_s, latency_s


def _time_round_trips(
    world: Group, peer: int, leads: bool, num_bytes: int, times: int, device: torch.device
) -> list[float]:
    """Return the seconds of ``times`` round trips of ``num_bytes`` bytes each way,
    after one warm-up.
    """
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times_s = []
    for _ in range(times + 1):
        begin_s = time.perf_counter()
        _transfer(world, peer, leads, message)
        _transfer(world, peer, not leads, message)
        times_s.append(time.perf_counter() - begin_s)
    return times_s[1:]


def _transfer(world: Group, peer: int, sends: bool, message: torch.Tensor) -> None:
    handle = world.transfer([message], peer, sends, lambda: "measuring a link")
    assert handle is not None
    handle.wait()
    if message.is_cuda:
        torch.cuda.synchronize(message.device)


def measure_all_reduces(mesh: Mesh) -> list[AllReduceTiming]:
    """Measure an all-reduce in every group of tp, dp (with cp: all replicas) and pp;
    groups of one axis run at once.

    Every rank calls it and gets the same list; blocks. Each rank sends 2 ``SUMMED_BYTES`` (n-1)/n
    bytes per all-reduce.
    """
    groups = {Axis.TP: mesh.tp, Axis.DP: mesh.replicas, Axis.PP: mesh.pp}
    found: list[AllReduceTiming] = []
    for axis, group in groups.items():
        mine: AllReduceTiming | None = None
        if group.size > 1:
            latency_s = _time_all_reduce(group, torch.zeros(2, device=mesh.device), LATENCY_REPEATS)
            seconds = _time_all_reduce(
                group, torch.zeros(SUMMED_BYTES // 4, device=mesh.device), REPEATS
            )
            sent = 2 * SUMMED_BYTES * (group.size - 1) / group.size
            mine = None
            if group.rank == 0:
                mine = AllReduceTiming(str(axis), group.ranks, seconds, sent / seconds, latency_s)
        found += [
            each for each in mesh.world.gather_objects(mine, AllReduceTiming) if each is not None
        ]
    return found


def _time_all_reduce(group: Group, numbers: torch.Tensor, times: int) -> float:
    """Return the median seconds of ``times`` all-reduces of ``numbers`` (any shape),
    after one warm-up; blocks.
    """
    times_s = []
    for _ in range(times + 1):
        group.barrier()
        begin_s = time.perf_counter()
        group.all_reduce(numbers).wait()
        if numbers.is_cuda:
            torch.cuda.synchronize(numbers.device)
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[1:])


def by_node(links: Sequence[LinkMeasurement]) -> dict[str, float]:
    """Return each node's best bandwidth to any other node, in bytes per second:
    one slow partner does not count.
    """
    best: dict[str, float] = {}
    for link in links:
        if link.nodes[0] != link.nodes[1]:
            for node in link.nodes:
                best[node] = max(best.get(node, 0.0), link.bytes_per_s)
    return best


def slow_pairs(links: Sequence[LinkMeasurement], share: float) -> list[LinkMeasurement]:
    """Return links across nodes that are slower than ``share`` of the best bandwidth
    of both their nodes.
    """
    best = by_node(links)
    across = [link for link in links if link.nodes[0] != link.nodes[1]]
    return [
        link for link in across if all(link.bytes_per_s < share * best[node] for node in link.nodes)
    ]
