"""Holders of copies on another node: pure.

node a   ranks 0 1 2        node b   ranks 3 4        node c   ranks 5
held on b by 3 4 3          held on c by 5 5          held on a by 0
"""

from __future__ import annotations

from collections.abc import Sequence


def ranks_of_nodes(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each node, in the order of the nodes' first ranks; ``nodes``: name of the
    node of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return ranks


def holders_on_next_nodes(nodes: Sequence[str]) -> dict[int, int]:
    """Return the rank on the next node that holds a copy of what each rank has, in turns where the
    nodes have unequal numbers of ranks. Empty if all ranks are on one node.
    """
    ranks_of = ranks_of_nodes(nodes)
    names = list(ranks_of)
    if len(names) < 2:
        return {}
    holders: dict[int, int] = {}
    for node, following in zip(names, [*names[1:], names[0]], strict=True):
        held_by = ranks_of[following]
        for position, rank in enumerate(ranks_of[node]):
            holders[rank] = held_by[position % len(held_by)]
    return holders
