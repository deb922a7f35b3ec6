"""Number of keys that each query attends to, counted token by token:
oracle for the balance of token orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.context_parallel.order import Places


def keys_seen(length: int, starts: Iterable[int] = (), window: int | None = None) -> list[int]:
    """Return the number of keys that each query sees: those of its document up to itself,
    ``window`` at most.
    """
    begins, found, first = set(starts), [], 0
    for place in range(length):
        first = place if place in begins else first
        seen = place + 1 - first
        found.append(seen if window is None else min(seen, window))
    return found


def imbalance(ranks: Sequence[Places], seen: Sequence[int]) -> float:
    """Return the keys of the busiest rank over the mean, minus 1. ``seen``:
    from :func:`keys_seen`.
    """
    loads = [sum(seen[place] for place in places) for places in ranks]
    return max(loads) * len(loads) / sum(loads) - 1
