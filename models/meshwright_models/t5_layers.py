"""Layers of T5: attention with relative position bias, feed-forward, the blocks of both stacks.

The values passed between layers are listed in ``t5.py``. Shapes: B samples, S tokens of either
stack, Se and Sd of encoder and decoder, Sq and Sk of queries and keys, D hidden, H heads, d
head_dim, F feed-forward. Under tensor parallelism H and F are local counts (H/tp, F/tp) and follow
from tensor shapes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

Value = dict[str, Tensor]


class T5Sizes(NamedTuple):
    """Sizes that all blocks of a T5 share."""

    hidden_size: int
    num_heads: int
    head_dim: int
    ffn_size: int
    num_blocks: int | None  # blocks of gate and up rows of a gated feed-forward; None: not gated
    num_buckets: int  # rows of the relative position bias
    max_distance: int  # all tokens from this distance on share one bias
    dropout: float
    norm_eps: float


def bucket_of_distance(num_buckets: int, max_distance: int) -> list[int]:
    """Return the bucket in [0, num_buckets) of each distance 0 .. max_distance.
    Larger distances share the last one's.

    The nearer half has one distance per bucket. The other buckets grow by a constant factor up to
    ``max_distance`` (section 2.1)::

        n = num_buckets / 2     bucket(r) = r  for r < n,  else  n + floor(n log(r / n) / log(max_distance / n))

    In whole numbers: r is in bucket n + k or higher when (r / n)^n >= (max_distance / n)^k. A
    floating-point logarithm would be rounded differently on different machines exactly where a
    bucket begins.
    """
    near = num_buckets // 2
    far = num_buckets - near
    table = []
    for distance in range(max_distance + 1):
        bucket = min(distance, near)
        while near <= bucket < num_buckets - 1:
            k = bucket + 1 - near
            if distance**far * near**k < max_distance**k * near**far:
                break
            bucket += 1
        table.append(bucket)
    return table


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask for scores, shaped like ``seen`` (bool): 0 for visible keys,
    else the dtype's minimum.

    Minus infinity would give 0/0 for a sample that is all padding. With the minimum all its keys
    weigh the same.
    """
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
        ~seen, torch.finfo(dtype).min
    )


class T5Embedding(nn.Module):
    """Token embedding and dropout: token ids (B, S) int64 -> (B, S, D).
    Positions enter in the attention.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids (B, S) int64 as (B, S, D)."""
        return self.dropout(self.tokens(ids))


class EncoderEmbedding(T5Embedding):
    """Embedding of the encoder: samples -> the encoder's value. ``padding_id``:
    token without attention; -1: none.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float, padding_id: int) -> None:
        super().__init__(vocab_size, hidden_size, dropout)
        self.padding_id = padding_id

    def forward(self, samples: Value) -> Value:
        """Embed encoder_ids (B, Se) int64 as (B, Se, D) and mark padding. decoder_ids (B, Sd)
        pass unchanged.
        """
        ids = samples["encoder_ids"]
        seen = ids != self.padding_id
        return {
            "encoder": self.embed(ids),
            "encoder_seen": seen,
            "decoder_ids": samples["decoder_ids"],
        }


class DecoderEmbedding(T5Embedding):
    """Embedding of the decoder: the encoder's value -> the decoder's.
    ``encoder`` is the memory and stays unchanged.
    """

    def forward(self, value: Value) -> Value:
        """Embed decoder_ids (B, Sd) int64 as (B, Sd, D)."""
        ids, memory, seen = value["decoder_ids"], value["encoder"], value["encoder_seen"]
        return {"decoder": self.embed(ids), "encoder": memory, "encoder_seen": seen}


class T5Attention(nn.Module):
    """Base of self- and cross-attention: the core, its dropout (heads in dim 1),
    the output projection.
    """

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.drops = sizes.dropout > 0
        self.core = T5AttentionCore()
        self.dropout = nn.Dropout(sizes.dropout)
        self.out = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=False)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, padding: Tensor | None
    ) -> Tensor:
        """Attend and project. q: (B, H, Sq, d); k, v: (B, H, Sk, d); bias, padding: see the core.
        Return (B, Sq, D).
        """
        mixed = self.core(
            q, k, v, bias, padding, self.dropout if self.training and self.drops else None
        )
        return self.out(rearrange(mixed, "b h s d -> b s (h d)"))


class T5AttentionCore(nn.Module):
    """Attention scores without scaling, probabilities and weighted sum:
    cheap to recompute and expensive to store.

    A separate module, so that ``selective_recompute`` can name it. It has no parameters. The parent
    passes in the dropout of the probabilities, whose masks are seeded by its module name in the
    parent.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        padding: Tensor | None,
        dropout: nn.Module | None,
    ) -> Tensor:
        """Attend: q (B, H, Sq, d), k and v (B, H, Sk, d) -> (B, H, Sq, d).

        Two terms are added to the scores: ``bias`` (1, H, Sq, Sk), equal for all samples, and
        ``padding`` (B, 1, 1, Sk), equal for all heads and queries. They are separate arguments
        because their sum is large.

        Runs the fused kernel, except with dropout: the kernel draws its own masks, which cannot be
        seeded by name.
        """
        added = padding if bias is None else bias if padding is None else bias + padding
        if dropout is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=1.0)
        scores = q @ k.transpose(-1, -2) + (0.0 if added is None else added)
        probabilities = scores.softmax(
            -1, dtype=torch.promote_types(scores.dtype, torch.float32)
        ).to(v.dtype)
        return dropout(probabilities) @ v


class T5SelfAttention(T5Attention):
    """Self-attention, (B, S, D) -> (B, S, D),
    with a learned relative position bias per head added to the scores.

    Rows of ``qkv``: q, k and v of head 0, then of head 1, ... Columns of ``relative_bias``: the
    heads. In the encoder half of its rows are for later keys. A causal stack has no later keys, so
    all rows are for earlier ones.
    """

    bucket_of_distance: Tensor

    def __init__(self, sizes: T5Sizes, *, causal: bool) -> None:
        super().__init__(sizes)
        self.causal = causal
        self.buckets_before = sizes.num_buckets if causal else sizes.num_buckets // 2
        self.qkv = nn.Linear(sizes.hidden_size, 3 * sizes.num_heads * sizes.head_dim, bias=False)
        self.relative_bias = nn.Embedding(sizes.num_buckets, sizes.num_heads)
        table = torch.tensor(
            bucket_of_distance(self.buckets_before, sizes.max_distance), device="cpu"
        )
        self.register_buffer("bucket_of_distance", table, persistent=False)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Attend over x (B, S, D) -> (B, S, D). ``seen``: (B, S) bool, False for padding; None:
        no padding.
        """
        q, k, v = rearrange(
            self.qkv(x), "b s (h three d) -> three b h s d", three=3, d=self.head_dim
        )
        bias = self.bias(q.shape[2], q.device)[None]  # (1, H, S, S)
        if self.causal:
            seen_before = torch.ones(bias.shape[2:], dtype=torch.bool, device=q.device).tril()
            bias = bias + additive_mask(seen_before, bias.dtype)
        return self.attend(
            q, k, v, bias, None if seen is None else additive_mask(seen[:, None, None], q.dtype)
        )

    def bias(self, length: int, device: torch.device) -> Tensor:
        """Return the relative position bias (H, S, S); entry (i, j)
        of a head depends on j - i alone.

        It is looked up once for each of the 2 S - 1 differences, ``1 - S .. S - 1``. Row i is a
        window over them::

            differences   -2  -1   0   1   2         S = 3
            query 2        |---------|
            query 1            |---------|
            query 0                |---------|
        """
        differences = torch.arange(
            1 - length, length, device=device
        )  # key position - query position
        table = self.bucket_of_distance.to(device)
        buckets = table[differences.abs().clamp(max=len(table) - 1)]
        if not self.causal:
            buckets = buckets + (differences > 0) * self.buckets_before
        by_difference = self.relative_bias(buckets)  # (2 S - 1, H)
        return by_difference.t().unfold(1, length, 1).flip(1)


class T5CrossAttention(T5Attention):
    """Cross-attention from the decoder to the memory: (B, Sd, D) and (B, Se, D) -> (B, Sd, D).
    No position bias.

    Rows of ``q``: head 0, head 1, ...; of ``kv``: k and v of head 0, then of head 1, ...
    """

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__(sizes)
        self.q = nn.Linear(sizes.hidden_size, sizes.num_heads * sizes.head_dim, bias=False)
        self.kv = nn.Linear(sizes.hidden_size, 2 * sizes.num_heads * sizes.head_dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """Attend from x (B, Sd, D) to memory (B, Se, D) -> (B, Sd, D). ``seen``: (B, Se) bool,
        False for padding.
        """
        q = rearrange(self.q(x), "b s (h d) -> b h s d", d=self.head_dim)
        k, v = rearrange(self.kv(memory), "b s (h two d) -> two b h s d", two=2, d=self.head_dim)
        return self.attend(q, k, v, None, additive_mask(seen[:, None, None], q.dtype))


class T5Mlp(nn.Module):
    """Feed-forward down(relu(up(x))), or gated down(gelu(gate(x)) * up(x)) (Shazeer 2020): (B, S,
    D) -> (B, S, D).

    With ``num_blocks`` it is gated, and gate and up are one projection. Its rows are ordered in
    blocks, so that a contiguous run of blocks is whole::

        | gate 0 .. f-1 | up 0 .. f-1 | gate f .. 2f-1 | up f .. 2f-1 | ...        f = ffn_size / num_blocks
    """

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        gated = sizes.num_blocks is not None
        self.block_size = (
            sizes.ffn_size // sizes.num_blocks if sizes.num_blocks is not None else None
        )
        self.up = nn.Linear(
            sizes.hidden_size, 2 * sizes.ffn_size if gated else sizes.ffn_size, bias=False
        )
        self.dropout = nn.Dropout(sizes.dropout)
        self.down = nn.Linear(sizes.ffn_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.block_size is None:
            x = F.relu(self.up(x))
        else:
            gate, up = rearrange(
                self.up(x), "b s (n two f) -> two b s n f", two=2, f=self.block_size
            )
            x = rearrange(F.gelu(gate, approximate="tanh") * up, "b s n f -> b s (n f)")
        return self.down(self.dropout(x))


class T5Block(nn.Module):
    """Pre-norm residual block of either stack: self-attention, cross-attention in the decoder,
    feed-forward.
    """

    causal = False

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.attention = T5SelfAttention(sizes, causal=self.causal)
        self.after_attention = nn.Dropout(sizes.dropout)
        self.mlp_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.mlp = T5Mlp(sizes)
        self.after_mlp = nn.Dropout(sizes.dropout)


class EncoderBlock(T5Block):
    """Encoder block: updates ``encoder`` (B, Se, D)
    of the encoder's value and passes the rest unchanged.
    """

    def forward(self, value: Value) -> Value:
        x = value["encoder"]
        x = x + self.after_attention(self.attention(self.attention_norm(x), value["encoder_seen"]))
        x = x + self.after_mlp(self.mlp(self.mlp_norm(x)))
        return {**value, "encoder": x}


class DecoderBlock(T5Block):
    """Decoder block: updates ``decoder`` (B, Sd, D) of the decoder's value.
    The last block returns only ``decoder``.
    """

    causal = True

    def __init__(self, sizes: T5Sizes, *, last: bool) -> None:
        super().__init__(sizes)
        self.cross_attention_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.cross_attention = T5CrossAttention(sizes)
        self.after_cross_attention = nn.Dropout(sizes.dropout)
        self.last = last

    def forward(self, value: Value) -> Value:
        x, memory, seen = value["decoder"], value["encoder"], value["encoder_seen"]
        x = x + self.after_attention(self.attention(self.attention_norm(x)))
        x = x + self.after_cross_attention(
            self.cross_attention(self.cross_attention_norm(x), memory, seen)
        )
        x = x + self.after_mlp(self.mlp(self.mlp_norm(x)))
        return {"decoder": x} if self.last else {**value, "decoder": x}


class EncoderNorm(nn.Module):
    """End of the encoder: norm and dropout of ``encoder`` (B, Se, D);
    the rest of the value is unchanged.
    """

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, value: Value) -> Value:
        return {**value, "encoder": self.dropout(self.norm(value["encoder"]))}


class DecoderNorm(EncoderNorm):
    """End of the decoder: norm, dropout, ``scale``. Maps the decoder's value to (B, Sd, D)
    for the head.
    """

    def __init__(self, sizes: T5Sizes, scale: float) -> None:
        super().__init__(sizes)
        self.scale = scale

    def forward(self, value: Value) -> Tensor:  # type: ignore[override]
        return self.dropout(self.norm(value["decoder"])) * self.scale
