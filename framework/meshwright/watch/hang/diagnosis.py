"""Diagnosis of a hang: the rank that blocks all others. Pure: a table of heartbeats in,
a sentence out.

    rank 3  in the all-reduce of the dp ranks      --> rank 1, which has not entered it
    rank 1  waits to receive F of micro-batch 2    --> rank 0
    rank 0  reading samples                            waits for no rank: the cause

In a collective a rank waits for the ranks that have entered fewer collectives of the group. The
edges of this wait-for graph (wait_graph.py) are followed to their ends. The first of these cases
that applies is reported:

    silent     a rank without recent heartbeats: its process is stopped, or its machine is gone
    different  ranks that are in different collectives with the same number
    busy       a rank that waits for no other rank and has been in one activity for long
    cycle      ranks that wait for each other (deadlock)

NOTE [waits on CUDA]: there a handle's wait returns at once, and hosts wait for the device without
an edge. All ranks of a hanging step look busy then. Those are named that have posted fewer
collectives of a group than its other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.mesh import Grid
from meshwright.watch.hang.heartbeat import (
    Heartbeat,
    ReceivedHeartbeat,
    collective,
    describe_activity,
    exchange,
    in_words,
    one_line,
    place,
)
from meshwright.watch.hang.wait_graph import WaitGraph

MAX_NAMED = 3
MAX_LINES = 16


class Verdict(NamedTuple):
    """Cause of a hang."""

    reason: str
    """Sentence of one line."""
    ranks: tuple[int, ...]
    """Ranks to inspect."""
    stuck: tuple[int, ...] = ()
    """All ranks that are silent, or that are busy with themselves for too long: without them the
    others would go on. Empty for a deadlock, or if it is not known.
    """


def judge(
    table: Mapping[int, ReceivedHeartbeat], grid: Grid, silent_s: float, long_s: float
) -> Verdict:
    """Find the ranks that keep the others waiting.

    Args:
        table: last heartbeat of each rank.
        grid: the mesh, for coordinates in the text.
        silent_s: a rank whose heartbeat is older is silent.
        long_s: a rank that is in one activity for at least this long, and waits for no other rank,
            is stuck.
    """
    silent = {rank for rank, (beat, quiet_s) in table.items() if beat is None or quiet_s > silent_s}
    graph = WaitGraph(table, silent)
    weight = graph.weights()
    ends = sorted(weight, key=lambda rank: (-weight[rank], rank))
    lagging = _lagging_ranks(table)
    formatter = _VerdictFormatter(table, grid, graph, lagging)

    quiet = [rank for rank in ends if rank in silent]
    if quiet:
        return formatter.ends(quiet, silent)._replace(stuck=tuple(sorted(silent)))
    different = _different(table)
    if different:
        return formatter.different(*different)
    stuck = [
        rank for rank in ends if (beat := table[rank].beat) is not None and beat.for_s >= long_s
    ]
    if stuck:
        needed = [rank for rank in stuck if weight[rank] or rank in lagging] or stuck
        return formatter.ends(needed, silent)._replace(stuck=tuple(sorted(needed)))
    cycle = graph.cycle()
    if cycle:
        return formatter.cycle(cycle)
    return formatter.ends(ends, silent)


def lines(
    table: Mapping[int, ReceivedHeartbeat],
    grid: Grid,
    silent_s: float,
    first: tuple[int, ...] = (),
    most: int | None = None,
) -> list[str]:
    """Format the table of heartbeats: a header, then one line for each rank.

    ``most`` limits the lines after the header: the ranks of ``first`` are listed, and a last line
    counts the omitted ranks.
    """
    order = sorted(table)
    if most is not None and len(order) > most:
        order = sorted([*first, *(rank for rank in order if rank not in first)][: most - 1])
    rows = [("rank", "at", "step", "for", "activity")]
    for rank in order:
        beat, quiet_s = table[rank]
        if beat is None:
            rows.append((str(rank), place(grid, rank), "", "", "no heartbeat yet"))
            continue
        activity = one_line(describe_activity(beat))
        activity += f"; no heartbeat for {seconds(quiet_s)}" if quiet_s > silent_s else ""
        rows.append((str(rank), place(grid, rank), str(beat.step), seconds(beat.for_s), activity))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    texts = [
        f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}} "
        f" {row[3]:>{widths[3]}}  {row[4]}"
        for row in rows
    ]
    num_omitted = len(table) - len(order)
    return [*texts, f"... and {num_omitted:,} more ranks"] if num_omitted else texts


def seconds(value: float) -> str:
    """Format seconds as ``42 s``, or ``4.2 s`` below ten."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _lagging_ranks(table: Mapping[int, ReceivedHeartbeat]) -> set[int]:
    """Return the ranks that have posted fewer collectives of a group than another rank of it.

    A rank that has itself posted more than another one of a group may wait for that one. Such ranks
    are left out, unless all are of this kind.
    """
    posted = {rank: beat.posted for rank, (beat, _) in table.items() if beat is not None}
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for of_rank in posted.values():
        for key, number in of_rank.items():
            least[key] = min(least.get(key, number), number)
            most[key] = max(most.get(key, number), number)
    lagging = {
        rank
        for rank, of_rank in posted.items()
        if any(number < most[key] for key, number in of_rank.items())
    }
    last = {
        rank
        for rank in lagging
        if all(number == least[key] for key, number in posted[rank].items())
    }
    return last or lagging


def _different(table: Mapping[int, ReceivedHeartbeat]) -> tuple[int, int] | None:
    """Find two ranks that wait in different operations of a group's collective
    with the same number; None if none.
    """
    first: dict[tuple[str, int], tuple[int, str]] = {}
    for rank in sorted(table):
        beat = table[rank].beat
        if beat is None or beat.waits is None or beat.waits.how != "collective":
            continue
        waits = beat.waits
        other, operation = first.setdefault((waits.key, waits.number), (rank, waits.signature()))
        if operation != waits.signature():
            return other, rank
    return None


class _VerdictFormatter(NamedTuple):
    """Formatter of verdicts, with the heartbeats, the wait-for graph,
    and the ranks with fewer collectives.
    """

    table: Mapping[int, ReceivedHeartbeat]
    grid: Grid
    graph: WaitGraph
    lagging: set[int]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({place(self.grid, rank)})"

    def ends(self, ranks: list[int], silent: set[int]) -> Verdict:
        """Describe the ranks at the ends of the wait-for graph."""
        parts, named = [], tuple(ranks[:MAX_NAMED])
        for rank in named:
            what = self._silent(rank) if rank in silent else self._busy(rank)
            waiting = self.graph.first_waiting(rank)
            late = ""
            if rank in self.lagging:
                late = ", and others have entered a collective that it has not"
            alone = f"{self.name(rank)} {what}{late}"
            parts.append(alone if waiting is None else f"{self._wait(waiting, rank)}, which {what}")
        more = len(ranks) - len(named)
        return Verdict(
            "; ".join(parts) + (f"; and {more} more ranks like these" if more else ""), named
        )

    def different(self, one: int, other: int) -> Verdict:
        a, b = self._beat(one).waits, self._beat(other).waits
        assert a is not None and b is not None
        reason = (
            f"{self.name(one)} is in {collective(a)}, and {self.name(other)} in the {b.operation}"
            " in its place: they do not call the same collectives in the same order"
        )
        return Verdict(reason, (one, other))

    def cycle(self, ranks: list[int]) -> Verdict:
        parts = [
            self._wait(rank, after)
            for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        ]
        return Verdict(f"deadlock: {'; '.join(parts)}", tuple(ranks))

    def _beat(self, rank: int) -> Heartbeat:
        beat = self.table[rank].beat
        assert beat is not None
        return beat

    def _silent(self, rank: int) -> str:
        beat, silent_s = self.table[rank]
        if beat is None:
            return "has never sent a heartbeat"
        return (
            f"has sent no heartbeat for {seconds(silent_s)}: its process {beat.pid} on {beat.host}"
            f" is stopped, or the machine is gone; it was last seen {in_words(beat.what)}"
        )

    def _busy(self, rank: int) -> str:
        beat = self._beat(rank)
        inside = ""
        # the heartbeat predates the end of the collective: all ranks have entered it
        if beat.waits is not None:
            inside = f" (since {collective(beat.waits)}, which all ranks have entered)"
        return f"has been {in_words(beat.what)}{inside} for {seconds(beat.for_s)}"

    def _wait(self, rank: int, after: int) -> str:
        beat = self._beat(rank)
        waits = beat.waits
        assert waits is not None
        if waits.how == "collective":
            return f"{self.name(rank)} waits in {collective(waits)} for {self.name(after)}"
        return f"{self.name(rank)} waits {exchange(waits)} {self.name(after)}"
