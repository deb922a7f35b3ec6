"""Causal self-attention over a fused projection, with grouped key-value heads,
within samples or their documents.

Shapes: B samples, S tokens, D hidden, H query heads, G key-value heads, R = H / G query heads of a
group, d head_dim. Under tensor parallelism a module may hold a contiguous part of its rows. H and G
are then local counts (H/tp, G/tp) and follow from tensor shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from meshwright_models import flex, some_queries
from meshwright_models.flex import Case, form_of

QUERY_BLOCK = 1024
"""Queries that attend together where a window or documents need a mask."""


def documents_of(starts: Tensor) -> Tensor:
    """Return each token's document number in its sample, (B, S) int64. starts: (B, S) bool,
    True at document starts.
    """
    return starts.cumsum(-1)


def positions_of(starts: Tensor) -> Tensor:
    """Return the position of each token in its document from 0, (B, S) int64. starts: (B, S)
    bool.
    """
    places = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
    return places - places.masked_fill(~starts, 0).cummax(-1).values


def document_bounds(starts: Tensor) -> list[list[int]]:
    """Return the document boundaries of each sample, from 0 to the length. starts: (B, S) bool,
    on the CPU.
    """
    length = starts.shape[-1]
    if type(starts) is not Tensor:  # a fake tensor has no values
        return [[0, length]] * starts.shape[0]
    return [sorted({0, *sample.nonzero().flatten().tolist(), length}) for sample in starts]


def can_read(tensor: Tensor) -> bool:
    """Return True if reading values costs no device synchronisation:
    on the CPU and outside torch.compile.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _reads_places(q: Tensor, places: Tensor) -> bool:
    return can_read(q) and type(q) is type(places) is Tensor


class AttentionShape(NamedTuple):
    """Sizes, window and score scale of an attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Number of tokens that each token attends to: itself and those just before it. None:
    all before it.
    """
    score_divisor: float | None = None
    """Divisor of the scores q k. None: sqrt(head_dim)."""


class Attention(nn.Module):
    """Causal self-attention, (B, S, D) -> (B, S, D), with R query heads to each key-value head.

    The rows of ``qkv`` are ordered by group, so that any contiguous run of groups is a smaller
    attention of its own::

        group 0                group 1
        | q0 .. qR-1 | k | v | q0 .. qR-1 | k | v | ...        each of q, k, v: head_dim rows

    With R = 1 this is GPT-2's ``[q k v]`` per head. ``dropout`` acts on the probabilities (B, H, S,
    S), heads in dim 1. ``bias`` is that of ``qkv``. ``qk_norm``: builder of a norm over a number of
    features, applied to queries and keys: over head_dim with one weight for all heads, or with
    ``norm_is_whole`` over the features of all heads together.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        bias: bool,
        out_bias: bool,
        dropout: float,
        rotary: nn.Module | None = None,
        qk_norm: Callable[[int], nn.Module] | None = None,
        norm_is_whole: bool = False,
    ) -> None:
        super().__init__()
        hidden_size, num_heads, num_kv_heads, self.head_dim, window, divisor = shape
        self.heads_per_group = num_heads // num_kv_heads
        self.drops = dropout > 0
        self.core = AttentionCore(window, divisor)
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        normed = (num_heads, num_kv_heads) if norm_is_whole else (1, 1)
        self.q_norm, self.k_norm = (
            None if qk_norm is None else qk_norm(n * self.head_dim) for n in normed
        )
        self.norm_is_whole = norm_is_whole
        self.rotary = rotary
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(num_heads * self.head_dim, hidden_size, bias=out_bias)
        self.fused_rows = {
            "qkv": (self.heads_per_group * self.head_dim, self.head_dim, self.head_dim)
        }
        self.shared_units = {"qkv": (self.fused_rows["qkv"], 2, "heads_per_group")}

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend causally in each sample or document. x: (B, S, D); starts: (B, S) bool or None.
        Return (B, S, D).
        """
        groups = rearrange(
            self.qkv(x), "b s (g r d) -> b g r s d", r=self.heads_per_group + 2, d=self.head_dim
        )
        # (B, G, R, S, d), (B, G, S, d) twice
        q, k, v = groups[:, :, :-2], groups[:, :, -2], groups[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            if self.norm_is_whole:
                q, k = (
                    norm_heads(self.q_norm, q),
                    norm_heads(self.k_norm, k.unsqueeze(2)).squeeze(2),
                )
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            cos, sin = self.rotary(q) if starts is None else self.rotary(q, positions_of(starts))
            # q has one more dim than k
            of_q = (cos, sin) if starts is None else (cos[:, None], sin[:, None])
            q, k = rotate(q, *of_q), rotate(k, cos, sin)
        dropout = self.dropout if self.training and self.drops else None
        # (B, H, S, d)
        mixed = self.core(rearrange(q, "b g r s d -> b (g r) s d"), k, v, dropout, starts)
        return self.out(rearrange(mixed, "b h s d -> b s (h d)"))


class AttentionCore(nn.Module):
    """Attention scores, probabilities and weighted sum: cheap to recompute and expensive to store.

    A separate module, so that ``selective_recompute`` can name it. It has no parameters. The parent
    passes in the dropout of the probabilities, whose masks are seeded by its module name in the
    parent.
    """

    meta_device = ""
    """Type of the device that tensors without values stand for, such as "cuda"."""

    def __init__(self, window: int | None = None, score_divisor: float | None = None) -> None:
        super().__init__()
        self.window = window
        self.score_divisor = score_divisor
        self.attention_function: Callable[..., Tensor] | None = None
        """Function that attends in the place of the kernels here: (q, k, v, places, *, scale,
        dropout, starts, window) -> (B, H, Q, d).
        """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: nn.Module | None,
        starts: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Attend: q (B, H, S, d), k and v (B, G, S, d), starts (B, S) bool or None -> (B, H, S, d).
        H, G: local heads.

        ``places``: (1 or B, Q) int64, ascending: positions in their samples of queries
        (B, H, Q, d) of some tokens.

        Runs the fused kernel, except with dropout: the kernel draws its own masks, which cannot be
        seeded by name.
        """
        heads_per_group, length = q.shape[1] // k.shape[1], k.shape[-2]
        scale = None if self.score_divisor is None else 1 / self.score_divisor
        if self.attention_function is not None:
            given = {"scale": scale, "dropout": dropout, "starts": starts, "window": self.window}
            return self.attention_function(q, k, v, places, **given)
        if dropout is None and places is not None:
            first = some_queries.first_seen(places, starts, self.window)
            if self.form(q, has_documents=True) == "flex":
                return flex.attend(q, k, v, places, first, scale)
            return some_queries.attend(
                q, k, v, places, first, scale, reads=_reads_places(q, places)
            )
        if dropout is None:
            return self._attend(q, k, v, starts, scale)
        k, v = (repeat(t, "b g s d -> b (g r) s d", r=heads_per_group) for t in (k, v))
        # (B, H, S, S)
        scores = q @ k.transpose(-1, -2) / (self.score_divisor or math.sqrt(q.shape[-1]))
        if places is None:
            document = None if starts is None else documents_of(starts)
            mask = self.seen(range(length), range(length), scores.device, document)
        else:
            mask = some_queries.seen(
                places, some_queries.first_seen(places, starts, self.window), range(length)
            )
        scores = scores.masked_fill(~mask, -math.inf)
        probabilities = scores.softmax(
            -1, dtype=torch.promote_types(scores.dtype, torch.float32)
        ).to(v.dtype)
        return dropout(probabilities) @ v

    def query_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: nn.Module | None,
        starts: Tensor | None = None,
        *,
        places: Tensor,
        length: int,
    ) -> list[slice] | None:
        """Return blocks of queries with which :meth:`forward` may be called one by one,
        each with some of the heads.

        None with dropout, whose mask spans all heads and queries, and with a function of the user.
        Arguments as in forward; k and v
        are not read.
        ``length``: number of keys S.
        """
        if dropout is not None or self.attention_function is not None:
            return None
        if self.form(q, has_documents=True) == "flex":
            return [slice(0, q.shape[-2])]
        first = some_queries.first_seen(places, starts, self.window)
        return some_queries.query_blocks(places, first, length, reads=_reads_places(q, places))

    def form(self, q: Tensor, has_documents: bool) -> flex.Form:
        """Return how queries (B, H, S, d) attend without dropout,
        see :func:`meshwright_models.flex.form_of`.
        """
        has_values = type(q) is Tensor and not q.is_meta
        kind = q.device.type if has_values else self.meta_device or q.device.type
        reads = kind == "cpu" and can_read(q)
        compiles = torch.compiler.is_compiling() or not has_values or flex.can_compile()
        sizes = q.shape[-1], q.shape[-2], self.window
        return form_of(Case(kind, q.dtype, *sizes, has_documents, reads=reads, compiles=compiles))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attend without dropout. q: (B, H, S, d); k, v: (B, G, S, d); starts: (B, S) or None.
        Return q's shape.
        """
        heads_per_group = q.shape[1] // k.shape[1]
        sees_all = starts is None and (self.window is None or self.window >= q.shape[-2])
        form = "causal" if sees_all else "blocks" if q.is_meta else self.form(q, starts is not None)
        if form == "causal":
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=heads_per_group > 1
            )
        if form == "by document":
            assert starts is not None
            return self._by_document(q, k, v, starts, scale)
        if form == "flex":
            places = torch.arange(q.shape[-2], device=q.device)[None]
            return flex.attend(
                q, k, v, places, some_queries.first_seen(places, starts, self.window), scale
            )
        # keys repeated per head: no GPU kernel with a mask supports GQA
        k, v = (repeat(t, "b g s d -> b (g r) s d", r=heads_per_group) for t in (k, v))
        return self._in_blocks(q, k, v, starts, scale)

    def _by_document(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float | None
    ) -> Tensor:
        """Attend document by document. q: (B, H, S, d); k, v: (B, G, S, d); starts: (B, S).
        Return q's shape.

        No mask is saved, and no key of another document is multiplied. The bytes do not depend on
        the documents, so a dry run, whose tensors have no values, treats each sample as one
        document.
        """
        samples = []
        for sample, bounds in enumerate(document_bounds(starts)):
            mixed = []
            for first, last in pairwise(bounds):
                near_q, near_k, near_v = (t[sample : sample + 1, :, first:last] for t in (q, k, v))
                mixed.append(self._attend(near_q, near_k, near_v, None, scale))
            samples.append(torch.cat(mixed, dim=2))
        return torch.cat(samples)

    def _in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attend block by block of queries. q, k, v: (B, H, S, d); starts: (B, S) bool or None.
        Return (B, H, S, d).

        A block skips the keys after it, and those before the window of its first query: no mask is
        (S, S). Shapes depend on S and the window alone, so that documents need no device
        synchronisation. Without documents, successive blocks with the same number of keys share one
        mask.
        """
        document = None if starts is None else documents_of(starts)
        mask: Tensor | None = None
        mixed, length = [], q.shape[-2]
        for first in range(0, length, QUERY_BLOCK):
            queries = range(first, min(first + QUERY_BLOCK, length))
            keys = range(
                0 if self.window is None else max(0, first + 1 - self.window), queries.stop
            )
            if mask is None or document is not None or mask.shape != (len(queries), len(keys)):
                mask = self.seen(queries, keys, q.device, document)
            of_queries, of_keys = slice(first, queries.stop), slice(keys.start, keys.stop)
            near_k, near_v = k[:, :, of_keys], v[:, :, of_keys]
            mixed.append(
                F.scaled_dot_product_attention(
                    q[:, :, of_queries], near_k, near_v, mask, scale=scale
                )
            )
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)

    def seen(
        self, queries: range, keys: range, device: torch.device, document: Tensor | None = None
    ) -> Tensor:
        """Return the attention mask, True where query i sees key j: (Q, K) bool, or (B, 1, Q, K)
        with documents.

        ``queries``, ``keys``: positions in the sample. ``document``: (B, S) int64, see
            :func:`documents_of`.
        """
        last = queries.start - keys.start  # the first query's place among the keys
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device).tril(last)
        if self.window is not None:
            mask = mask.triu(last + 1 - self.window)
        if document is None:
            return mask
        of_queries, of_keys = (
            document[:, queries.start : queries.stop],
            document[:, keys.start : keys.stop],
        )
        return (mask & (of_queries[:, :, None] == of_keys[:, None, :]))[:, None]


def norm_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm over the features of all heads together. x: (B, G, R, S, d).
    Return the same shape.
    """
    num_heads = x.shape[2]
    return rearrange(
        norm(rearrange(x, "b g r s d -> b s (g r d)")),
        "b s (g r d) -> b g r s d",
        r=num_heads,
        d=x.shape[-1],
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + r/2) of x (..., S, d) by angles given as cos and sin (..., S, r/2).
    Keeps x's dtype.

    Only the first r of the d features are rotated: all of them unless the model has partial rotary
    positions.

    The two elements of a pair are half a head apart, as in Hugging Face's checkpoints. Meta's
    checkpoints pair neighbours. That is the same model with the rows of q and k permuted.
    """
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
