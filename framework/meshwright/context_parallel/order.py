"""Orders of the tokens of a sample over context-parallel ranks: pure, without torch.

A causal query sees all keys before it, so that late tokens cost more. With cp = 2 and 8 tokens:

    contiguous   rank 0: 0 1 2 3    rank 1: 4 5 6 7    10 and 26 keys seen
    zigzag       rank 0: 0 1 6 7    rank 1: 2 3 4 5    18 and 18 keys seen
    documents    blocks of tokens, the costliest first, each to the rank with the fewest keys seen so far

The order does not affect numbers: attention uses gathered keys in the order of the sample.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

BY_DOCUMENTS = "documents"
"""Order that depends on the documents of each sample;
the other orders are the same for all samples.
"""
BLOCK = 128
"""Most tokens of a block by default: :func:`documents` assigns tokens to ranks in blocks."""

Places = tuple[int, ...]
"""Positions in the sample of one rank's tokens, ascending."""


def contiguous(length: int, cp: int) -> list[Places]:
    """Return a run of ``length / cp`` places for each rank."""
    share = length // cp
    return [tuple(range(rank * share, (rank + 1) * share)) for rank in range(cp)]


def zigzag(length: int, cp: int) -> list[Places]:
    """Return two runs for each rank r, the r-th from the start and the r-th from the end:
    ``length / cp`` places.
    """
    share = length // cp
    early, late = share // 2, share - share // 2
    return [
        (
            *range(rank * early, (rank + 1) * early),
            *range(length - (rank + 1) * late, length - rank * late),
        )
        for rank in range(cp)
    ]


def documents(
    length: int, cp: int, starts: Iterable[int] = (), block: int | None = None
) -> list[Places]:
    """Return equally many places for each rank,
    balanced by the keys that their queries see in their documents.

    ``starts``: first places of the documents. ``block``: tokens per block; None: at most 128, and
        at least 8 blocks per
    rank. A block is split if its rank has room for a part of it alone, because every rank gets
    ``length / cp`` tokens.
    """
    share = length // cp
    size = block or max(1, min(BLOCK, share // 8))
    keys = KeyCount(length, starts)
    blocks = [range(first, min(first + size, length)) for first in range(0, length, size)]
    blocks.sort(key=lambda run: (-keys.seen_by(run), run.start))
    loads = [(0, rank) for rank in range(cp)]  # (keys seen so far, rank)
    places_of: list[list[int]] = [[] for _ in range(cp)]
    for rest in blocks:
        while rest:
            load, rank = heapq.heappop(loads)  # a full rank leaves the heap
            places = places_of[rank]
            part = rest[: share - len(places)]
            places += part
            rest = rest[len(part) :]
            if len(places) < share:
                heapq.heappush(loads, (load + keys.seen_by(part), rank))
    return [tuple(sorted(places)) for places in places_of]


ORDERS: dict[str, Callable[[int, int], list[Places]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    BY_DOCUMENTS: documents,
}
"""Value of ``parallel.cp_order`` -> function (length, cp) -> places of all ranks,
for a sample of one document.
"""


class KeyCount:
    """Keys seen by runs of queries of one sample, from prefix sums over its documents:
    no loop over tokens.
    """

    def __init__(self, length: int, starts: Iterable[int] = ()) -> None:
        """Count in a sample of ``length`` tokens, whose documents begin at ``starts``."""
        self._starts = sorted({0, *(start for start in starts if start < length)})
        self._sums = [0]
        for first, last in pairwise([*self._starts, length]):
            self._sums.append(self._sums[-1] + (last - first) * (last - first + 1) // 2)

    def _before(self, place: int) -> int:
        """Return the keys seen by all queries before ``place``."""
        document = bisect_right(self._starts, place) - 1
        tokens = place - self._starts[document]
        return self._sums[document] + tokens * (tokens + 1) // 2

    def seen_by(self, queries: range) -> int:
        """Return the keys that these queries see in their documents, up to themselves."""
        return self._before(queries.stop) - self._before(queries.start)


def draw(ranks: Sequence[Places], columns: int = 64) -> str:
    """Draw a line for each rank: where its tokens lie in the sample,
    in at most ``columns`` columns.
    """
    length = sum(map(len, ranks))
    width = min(columns, length)
    lines = []
    for rank, places in enumerate(ranks):
        filled = {place * width // length for place in places}
        lines.append(
            f"cp{rank:<3} " + "".join("#" if column in filled else "." for column in range(width))
        )
    return "\n".join(lines)
