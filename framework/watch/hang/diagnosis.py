"""Out of what every rank does: who keeps all the others waiting. Pure: a table of heartbeats in, a sentence out.

    rank 3  in the all-reduce of the dp ranks      --> rank 1, which has not come to it
    rank 1  waits to receive F of micro-batch 2    --> rank 0
    rank 0  reading samples                            waits for nobody: it is this one

In a collective a rank waits for those that have come to fewer of their group's collectives than it has. Once the chains
are followed there is, in the order in which they are told:

    silent     a rank of which nothing is heard: its process is stopped, or its machine gone
    different  ranks that are in different collectives at the same place
    busy       a rank that waits for nobody and has done one thing for long
    cycle      ranks that wait for each other
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.mesh.grid import Grid
from meshwright.watch.hang.heartbeat import Heartbeat, ReceivedHeartbeat, collective, does, exchange, in_words, place

MOST_NAMED = 3
MOST_LINES = 16


class Verdict(NamedTuple):
    """Why a run stands still."""

    reason: str
    """One line."""
    ranks: tuple[int, ...]
    """Those to look at."""


def judge(table: Mapping[int, ReceivedHeartbeat], grid: Grid, silent_s: float, long_s: float) -> Verdict:
    """Who keeps the others waiting. ``silent_s``: not heard of for longer is silent; ``long_s``: longer is stuck."""
    silent = {rank for rank, seen in table.items() if seen.beat is None or seen.silent_s > silent_s}
    edges = {rank: set() if rank in silent else _waited_for(rank, table, silent) for rank in sorted(table)}
    ends = [rank for rank in edges if not edges[rank]]
    weight = Counter(reached for rank in edges for reached in _reached(rank, edges) if not edges[reached])
    ends.sort(key=lambda rank: (-weight[rank], rank))
    tell = _Teller(table, grid, edges)

    quiet = [rank for rank in ends if rank in silent]
    if quiet:
        return tell.ends(quiet, silent)
    different = _different(table)
    if different:
        return tell.different(*different)
    stuck = [rank for rank in ends if _for_s(table[rank]) >= long_s]
    if stuck:
        return tell.ends(stuck, silent)
    cycle = _cycle(edges)
    if cycle:
        return tell.cycle(cycle)
    return tell.ends(ends, silent)


def lines(
    table: Mapping[int, ReceivedHeartbeat],
    grid: Grid,
    silent_s: float,
    first: tuple[int, ...] = (),
    most: int | None = None,
) -> list[str]:
    """A line for each rank, those of ``first`` before the others when there is only room for ``most``."""
    order = sorted(table)
    if most is not None and len(order) > most:
        order = sorted([*first, *(rank for rank in order if rank not in first)][: most - 1])
    rows = [("rank", "at", "step", "for", "does")]
    for rank in order:
        beat, quiet_s = table[rank]
        if beat is None:
            rows.append((str(rank), place(grid, rank), "", "", "nothing was ever heard of it"))
            continue
        said = does(beat) + (f"; not heard of for {seconds(quiet_s)}" if quiet_s > silent_s else "")
        rows.append((str(rank), place(grid, rank), str(beat.step), seconds(beat.for_s), said))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    texts = [
        f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}"
        for row in rows
    ]
    left_out = len(table) - len(order)
    return [*texts, f"... and {left_out:,} more ranks"] if left_out else texts


def seconds(value: float) -> str:
    """``42 s``; under ten with a decimal."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _for_s(seen: ReceivedHeartbeat) -> float:
    return 0.0 if seen.beat is None else seen.beat.for_s


def _waited_for(rank: int, table: Mapping[int, ReceivedHeartbeat], silent: set[int]) -> set[int]:
    beat = table[rank].beat
    assert beat is not None
    waits = beat.waits
    if waits is None:
        return set()
    if waits.how != "collective":
        return set(waits.ranks)
    found = set()
    for other in waits.ranks:
        theirs = table[other].beat if other in table else None
        if theirs is None or theirs.posted.get(waits.key, 0) < waits.number:
            found.add(other)
    return found


def _reached(rank: int, edges: Mapping[int, set[int]]) -> set[int]:
    """Whom a rank waits for, directly or by way of others; itself only where it waits for itself."""
    found: set[int] = set()
    todo = list(edges[rank])
    while todo:
        other = todo.pop()
        if other not in found:
            found.add(other)
            todo += edges[other]
    return found


def _different(table: Mapping[int, ReceivedHeartbeat]) -> tuple[int, int] | None:
    """Two ranks that wait in different collectives of a group, where they should be in the same."""
    first: dict[tuple[str, int], tuple[int, str]] = {}
    for rank in sorted(table):
        beat = table[rank].beat
        if beat is None or beat.waits is None or beat.waits.how != "collective":
            continue
        waits = beat.waits
        other, operation = first.setdefault((waits.key, waits.number), (rank, waits.operation))
        if operation != waits.operation:
            return other, rank
    return None


def _cycle(edges: Mapping[int, set[int]]) -> list[int]:
    """The ranks of one circle, each waiting for the next; empty where there is none."""
    for start in edges:
        came_from: dict[int, int] = {}
        todo = deque([start])
        while todo:
            rank = todo.popleft()
            for other in sorted(edges[rank]):
                if other not in came_from:
                    came_from[other] = rank
                    todo.append(other)
        if start in came_from:
            path = [came_from[start]]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
    return []


class _Teller(NamedTuple):
    """Puts what was found into words."""

    table: Mapping[int, ReceivedHeartbeat]
    grid: Grid
    edges: Mapping[int, set[int]]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({place(self.grid, rank)})"

    def ends(self, ranks: list[int], silent: set[int]) -> Verdict:
        """Ranks at which chains of waiting end."""
        said, named = [], tuple(ranks[:MOST_NAMED])
        for rank in named:
            what = self._silent(rank) if rank in silent else self._busy(rank)
            waiting = [other for other in self.edges if rank in self.edges[other]]
            said.append(f"{self._wait(waiting[0], rank)}, which {what}" if waiting else f"{self.name(rank)} {what}")
        more = len(ranks) - len(named)
        return Verdict("; ".join(said) + (f"; and {more} more ranks like these" if more else ""), named)

    def different(self, one: int, other: int) -> Verdict:
        a, b = self._beat(one).waits, self._beat(other).waits
        assert a is not None and b is not None
        reason = (
            f"{self.name(one)} is in {collective(a)}, and {self.name(other)} in the {b.operation} in its place: they "
            f"do not call the same collectives in the same order"
        )
        return Verdict(reason, (one, other))

    def cycle(self, ranks: list[int]) -> Verdict:
        said = [self._wait(rank, after) for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
        return Verdict(f"deadlock: {'; '.join(said)}", tuple(ranks))

    def _beat(self, rank: int) -> Heartbeat:
        beat = self.table[rank].beat
        assert beat is not None
        return beat

    def _silent(self, rank: int) -> str:
        beat, silent_s = self.table[rank]
        if beat is None:
            return "was never heard of"
        return (
            f"has not been heard of for {seconds(silent_s)}: its process {beat.pid} on {beat.host} is stopped, or the "
            f"machine is gone; it was last seen {in_words(beat.what)}"
        )

    def _busy(self, rank: int) -> str:
        beat = self._beat(rank)
        inside = ""
        if beat.waits is not None:  # the beat is older than the end of what it waited for: all have come to it
            inside = f" (since {collective(beat.waits)}, to which all have come)"
        return f"has been {in_words(beat.what)}{inside} for {seconds(beat.for_s)}"

    def _wait(self, rank: int, after: int) -> str:
        beat = self._beat(rank)
        waits = beat.waits
        assert waits is not None
        if waits.how == "collective":
            return f"{self.name(rank)} waits in {collective(waits)} for {self.name(after)}"
        return f"{self.name(rank)} waits {exchange(waits)} {self.name(after)}"
