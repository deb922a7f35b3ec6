"""Rows of equal work: the samples of a step, dealt to micro-batches and replicas by the keys that
their queries see.

    documents of a sample -> keys that its queries see -> micro-batches of about equal sums -> replicas

The loss is a sum over the global batch, so any permutation of its rows gives the same step up to
rounding. The deal is a pure function of the samples' documents: every rank computes it by itself.
Numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Dealt = NDArray[np.int64]
"""(dp, chunks, micro_batch_size) positions in the global batch."""


class WeighedSource(Protocol):
    """Source whose samples have a work, as ``batch.balance`` needs."""

    def work(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the work of these samples of the run, (B,)."""


def keys_seen(lengths: Iterable[int]) -> int:
    """Return the keys that the queries of documents of these lengths see: each those of its
    document up to itself.
    """
    return sum(length * (length + 1) // 2 for length in lengths)


def deal(work: NDArray[np.int64], dp: int, chunks: int, micro_batch_size: int) -> Dealt:
    """Assign the rows of a global batch to micro-batches, and these to replicas.

    Micro-batches depend on ``dp x chunks`` alone, not on each: every layout has the same ones.

    Args:
        work: (dp x chunks x micro_batch_size,) work of each row.
    """
    microbatches = _microbatches(work, dp * chunks, micro_batch_size)
    sums = work[microbatches].sum(1)
    # micro-batches of one slot run side by side in all replicas, and ZeRO-2 and -3 reduce after
    # each: those of a slot are neighbours in the order of their work
    slots = np.argsort(-sums, kind="stable").reshape(chunks, dp)
    totals = np.zeros(dp, dtype=np.int64)
    dealt = np.empty((dp, chunks, micro_batch_size), dtype=np.int64)
    for slot, numbers in enumerate(slots):
        replicas = np.argsort(totals, kind="stable")  # the largest to the replica with the least
        dealt[replicas, slot] = microbatches[numbers]
        totals[replicas] += sums[numbers]
    return dealt


def _microbatches(work: NDArray[np.int64], count: int, size: int) -> NDArray[np.int64]:
    """Return the rows of micro-batches of about equal work, (count, size).

    In each round the rows with the most work that are left go to the micro-batches with the least,
    one each.
    """
    rounds = np.argsort(-work, kind="stable").reshape(size, count)
    sums = np.zeros(count, dtype=np.int64)
    rows = np.empty((count, size), dtype=np.int64)
    for place, numbers in enumerate(rounds):
        lightest = np.argsort(sums, kind="stable")
        rows[lightest, place] = numbers
        sums[lightest] += work[numbers]
    return rows


def replica_excess(work: NDArray[np.int64], dealt: Dealt) -> float:
    """Return the work of the busiest replica over the mean, minus 1."""
    totals = work[dealt].sum((1, 2))
    return float(totals.max() * len(totals) / max(1, totals.sum()) - 1)


def by_index(num_rows: int, dp: int, chunks: int) -> Dealt:
    """Return the deal in the order of the indices: NOTE [sample indices]."""
    return np.arange(num_rows, dtype=np.int64).reshape(dp, chunks, -1)
