"""Balance of context-parallel ranks over real documents:
the keys that the queries of each rank see. Numpy alone.

starts of documents in a sample -> keys that each query sees -> keys of each rank, in an order
busiest rank over the mean, minus 1 = imbalance
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.context_parallel.order import BY_DOCUMENTS, ORDERS, documents


def seen_keys(starts: NDArray[np.bool_], window: int | None = None) -> NDArray[np.int64]:
    """Return the number of keys that each query of a sample sees, (S,):
    those of its document up to itself.

    ``starts``: (S,), True at the first token of each document. ``window``: keys that a query sees
        at most.
    """
    places = np.arange(len(starts), dtype=np.int64)
    seen = places + 1 - np.maximum.accumulate(np.where(starts, places, 0))
    return seen if window is None else np.minimum(seen, window)


def rank_loads(
    order: str, cp: int, starts: NDArray[np.bool_], window: int | None = None, heads: bool = False
) -> NDArray[np.float64]:
    """Return the keys seen by each rank's queries of one sample, (cp,).

    ``heads``: ranks have all tokens of some heads each (an exchange by heads), so that all see
        equally many.
    """
    seen = seen_keys(starts, window)
    if cp == 1 or heads:
        return np.full(cp, seen.sum() / cp)
    if order == BY_DOCUMENTS:
        ranks = documents(len(starts), cp, np.flatnonzero(starts).tolist())
    else:
        ranks = ORDERS[order](len(starts), cp)
    return np.array(
        [seen[np.fromiter(places, np.int64)].sum() for places in ranks], dtype=np.float64
    )


def imbalance_of(loads: NDArray[np.float64]) -> float:
    """Return the keys of the busiest rank over the mean of all, minus 1."""
    return float(loads.max() * len(loads) / loads.sum() - 1)


def mean_imbalance(order: str, cp: int, samples: Sequence[NDArray[np.bool_]]) -> float:
    """Return the imbalance over micro-batches of one sample each:
    every attention waits for its busiest rank.
    """
    loads = [rank_loads(order, cp, starts) for starts in samples]
    return float(
        sum(sample.max() for sample in loads) * cp / sum(sample.sum() for sample in loads) - 1
    )


def batch_imbalance(order: str, cp: int, batches: Sequence[Sequence[NDArray[np.bool_]]]) -> float:
    """Return the imbalance over micro-batches:
    loads of a micro-batch's samples add up before ranks synchronise.

    ``batches``: the document starts of each sample, (S,).
    """
    loads = [sum(rank_loads(order, cp, starts) for starts in samples) for samples in batches]
    return float(
        sum(np.max(sample) for sample in loads) * cp / sum(np.sum(sample) for sample in loads) - 1
    )
