"""Causal attention of some queries of each sample to all of its keys,
as a context-parallel rank computes it.

A query sees one run of keys: from the start of its document, or of its window, up to itself.
Queries attend block by block. A caller that chooses the blocks may compute each again in backward,
so that no mask and no probability is saved. Where values can be read, a block is split into runs of
consecutive queries of one document. A run skips the keys that none of its queries sees, and needs
no mask if it begins with its document.

Shapes: B samples, Q queries, S tokens, H query heads, G key-value heads, d head_dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor

QUERY_BLOCK = 1024
"""Most queries of a block."""
MASK_ELEMENTS = {"cpu": 2**21}
"""Most elements of a block's mask, by type of device; on others 2^27, to keep a GPU busy."""
MANY_RUNS = 16
"""Number of runs from which on a block attends with one mask instead,
and queries of a block that is not split.
"""


def first_seen(places: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """Return the first key that each query sees, (1 or B, Q) int64.

    Args:
        places: (1 or B, Q) int64, positions of the queries.
        starts: (B, S) bool, True at document starts; None: one document. window: number of tokens
            seen at most.
    """
    first = torch.zeros_like(places)
    if starts is not None:
        numbers = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
        begins = numbers.masked_fill(~starts, 0).cummax(-1).values  # of each token's document
        first = begins.gather(1, places.expand(len(begins), -1))
    return first if window is None else torch.maximum(first, places + 1 - window)


def seen(places: Tensor, first: Tensor, keys: range) -> Tensor:
    """Return the mask of queries at ``places`` that see the keys from ``first`` on, (1 or B, 1, Q,
    K) bool.
    """
    numbers = torch.arange(keys.start, keys.stop, device=places.device)
    return ((numbers <= places[..., None]) & (numbers >= first[..., None]))[:, None]


def query_blocks(places: Tensor, first: Tensor, length: int, *, reads: bool) -> list[slice]:
    """Return blocks of queries whose masks are small.

    Args:
        places: (1 or B, Q) int64, ascending. first: see :func:`first_seen`. length: S.
        reads: reading values of tensors costs no synchronisation.
    """
    most, queries = MASK_ELEMENTS.get(places.device.type, 2**27), places.shape[1]
    if reads:
        return _small_blocks(slice(0, queries), places, first, most)
    size = max(1, min(QUERY_BLOCK, most // length))
    return [slice(at, min(at + size, queries)) for at in range(0, queries, size)]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Tensor,
    first: Tensor,
    scale: float | None,
    *,
    reads: bool,
) -> Tensor:
    """Attend with queries q (B, H, Q, d) to the keys k and values v (B, G, S, d),
    by :func:`query_blocks`.

    ``scale``: factor of the scores; None: 1 / sqrt(d). Return q's shape.
    """
    mixed = [
        _attend(q[:, :, block], k, v, places[:, block], first[:, block], scale, reads)
        for block in query_blocks(places, first, k.shape[-2], reads=reads)
    ]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


def _small_blocks(queries: slice, places: Tensor, first: Tensor, most: int) -> list[slice]:
    """Split the queries in halves until a block's mask has at most ``most`` elements."""
    size = queries.stop - queries.start
    keys = int(places[:, queries].max()) + 1 - int(first[:, queries].min())
    if size <= MANY_RUNS or (size <= QUERY_BLOCK and size * keys <= most):
        return [queries]
    middle = queries.start + size // 2
    halves = slice(queries.start, middle), slice(middle, queries.stop)
    return [block for half in halves for block in _small_blocks(half, places, first, most)]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, first: Tensor, scale: float | None, reads: bool
) -> Tensor:
    """Attend with the queries of a block. Arguments: those of :func:`attend`."""
    if not reads:
        return _masked(q, k, v, seen(places, first, range(k.shape[-2])), scale)
    places, first = (each.expand(q.shape[0], -1) for each in (places, first))
    mixed = []
    for sample, (at, low) in enumerate(zip(places.tolist(), first.tolist(), strict=True)):
        cuts = [
            0,
            *(i for i in range(1, len(at)) if at[i] != at[i - 1] + 1 or low[i] > low[i - 1] + 1),
            len(at),
        ]
        if len(cuts) > MANY_RUNS:
            cuts = [0, len(at)]
        for begin, end in pairwise(cuts):
            keys = range(low[begin], at[end - 1] + 1)
            near_q = q[sample : sample + 1, :, begin:end]
            near_k, near_v = (
                each[sample : sample + 1, :, keys.start : keys.stop] for each in (k, v)
            )
            mask = None
            if len(keys) != end - begin or low[begin:end] != [keys.start] * (end - begin):
                mask = seen(places[sample, None, begin:end], first[sample, None, begin:end], keys)
            mixed.append(_masked(near_q, near_k, near_v, mask, scale))
    by_sample = torch.cat(mixed, dim=2)  # (1, H, B Q, d)
    return by_sample if q.shape[0] == 1 else torch.cat(by_sample.split(q.shape[-2], dim=2))


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attend with a mask; without one causally, as many queries as keys.
    Keys are repeated for the heads of a group.
    """
    k, v = (repeat(each, "b g s d -> b (g r) s d", r=q.shape[1] // k.shape[1]) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
