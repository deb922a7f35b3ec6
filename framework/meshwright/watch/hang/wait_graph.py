"""Wait-for graph of the ranks of a hanging run. Pure: a table of heartbeats in, no torch.

    rank 3 --> (dp, 12) --> (dp, 11) --> rank 1      rank 1 has entered 10 collectives of the dp ranks
                   |
                   '------> rank 2 --> rank 1        rank 2 has entered 11, and receives from rank 1

A collective is one node, however many ranks wait in it. It leads to the next lower collective of
its group that ranks wait in, and to the ranks that have entered that one but not this one. The
number of edges is that of the waits and of the members of groups. Edges from each rank to each rank
that it waits for would be millions with 2,048 ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping

from meshwright.watch.hang.heartbeat import ReceivedHeartbeat

Node = int | tuple[str, int]
"""Rank, or the key of a group and the number of one of its collectives."""


class WaitGraph:
    """Ranks and the collectives that they wait in, each with the nodes that it waits for."""

    def __init__(self, table: Mapping[int, ReceivedHeartbeat], silent: Collection[int]) -> None:
        """Build the graph. Ranks in ``silent`` wait for none:
        their last heartbeat is out of date.
        """
        self._table = table
        self._ranks = sorted(table)
        self._edges: dict[Node, list[Node]] = {rank: [] for rank in self._ranks}
        members: dict[str, set[int]] = {}
        numbers: dict[str, set[int]] = {}
        for rank in self._ranks:
            beat = table[rank].beat
            waits = None if beat is None or rank in silent else beat.waits
            if waits is not None and waits.how != "collective":
                self._edges[rank] = list(waits.ranks)
            elif waits is not None:
                self._edges[rank] = [(waits.key, waits.number)]
                numbers.setdefault(waits.key, set()).add(waits.number)
                if waits.key not in members:
                    members[waits.key] = {rank, *waits.others()}
        for key, ranks in members.items():
            self._add_collectives(key, sorted(numbers[key]), ranks)
        for rank in self._ranks:  # all ranks have entered it: it keeps none waiting
            self._edges[rank] = [
                node for node in self._edges[rank] if isinstance(node, int) or self._edges[node]
            ]

    def _add_collectives(self, key: str, numbers: list[int], members: Collection[int]) -> None:
        """Add the nodes of a group's collectives. ``numbers``: those that ranks wait in,
        ascending.
        """
        missing: dict[int, list[Node]] = {number: [] for number in numbers}
        for rank in sorted(members):
            first = bisect_right(numbers, self._entered(rank, key))
            if first < len(numbers):
                missing[numbers[first]].append(rank)
        below: list[Node] = []
        for number in numbers:
            self._edges[key, number] = [*below, *missing[number]]
            below = [(key, number)] if self._edges[key, number] else []

    def _entered(self, rank: int, key: str) -> int:
        """Return the number of collectives of a group that a rank has entered,
        at its last heartbeat.
        """
        beat = self._table[rank].beat if rank in self._table else None
        if beat is None:
            return 0
        present = beat.waits.number if beat.waits is not None and beat.waits.key == key else 0
        return max(beat.posted.get(key, 0), present)

    def weights(self) -> dict[int, int]:
        """Return, for each rank that waits for no other, the number of ranks that wait for it,
        directly or not.
        """
        waiting: dict[Node, int] = {}
        """Bit sets of the ranks that wait for a node, until the node's turn."""
        weight: dict[int, int] = {}
        for component in reversed(self._components()):
            inside, ranks = set(component), 0
            for node in component:
                ranks |= waiting.pop(node, 0)
            for node in component:
                if isinstance(node, int):
                    if node in self._edges and not self._edges[node]:
                        weight[node] = ranks.bit_count()
                    ranks |= 1 << node
            for node in component:
                for other in self._edges.get(node, ()):
                    if other not in inside:
                        waiting[other] = waiting.get(other, 0) | ranks
        return weight

    def first_waiting(self, rank: int) -> int | None:
        """Return the lowest rank that waits directly for this one; None if none does."""
        targets: set[Node] = {rank}
        # the collectives of a group are in ascending order
        for node, others in self._edges.items():
            if not isinstance(node, int) and not targets.isdisjoint(others):
                targets.add(node)
        return next(
            (other for other in self._ranks if not targets.isdisjoint(self._edges[other])), None
        )

    def cycle(self) -> list[int]:
        """Find a cycle of ranks, each waiting for the next; empty if there is none."""
        looped = [
            each
            for each in self._components()
            if len(each) > 1 or each[0] in self._edges.get(each[0], ())
        ]
        start = min(
            (node for each in looped for node in each if isinstance(node, int)), default=None
        )
        if start is None:
            return []
        previous: dict[Node, Node] = {}
        queue: deque[Node] = deque([start])
        while start not in previous:
            node = queue.popleft()
            for other in self._edges.get(node, ()):
                if other not in previous:
                    previous[other] = node
                    queue.append(other)
        path = [previous[start]]
        while path[-1] != start:
            path.append(previous[path[-1]])
        return [node for node in reversed(path) if isinstance(node, int)]

    def _components(self) -> list[list[Node]]:
        """Return the strongly connected components (Tarjan's algorithm),
        each after all that it leads to.
        """
        order: dict[Node, int] = {}
        low: dict[Node, int] = {}
        is_open: dict[Node, None] = {}
        """Nodes of unfinished components, in the order of their visits."""
        found: list[list[Node]] = []
        for root in self._edges:
            work = [] if root in order else [(root, iter(self._edges[root]))]
            while work:
                node, others = work[-1]
                if node not in order:
                    order[node] = low[node] = len(order)
                    is_open[node] = None
                for other in others:
                    if other not in order:
                        work.append((other, iter(self._edges.get(other, ()))))
                        break
                    if other in is_open:
                        low[node] = min(low[node], order[other])
                else:
                    work.pop()
                    if work:
                        parent = work[-1][0]
                        low[parent] = min(low[parent], low[node])
                    if low[node] == order[node]:
                        component: list[Node] = []
                        while not component or component[-1] != node:
                            component.append(is_open.popitem()[0])
                        found.append(component)
        return found
