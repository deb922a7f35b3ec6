"""Exchange of keys and values between context-parallel ranks.

    forward     (B, G, S/cp, d) of each rank -- all-gather -->     (B, G, S, d), in the order of the sample
    backward    this rank's (B, G, S/cp, d)  <-- reduce-scatter -- (B, G, S, d), the gradient by this rank's queries

The queries of a rank stay where they are and see all keys, so that any mask works and each row of scores is computed as
in one process. Both collectives block (on CUDA: the stream). Bytes on the wire of a rank, forward and backward alike,
with b bytes an element: 2 B G S d b (cp-1)/cp.

Shapes: B samples, G key-value heads of this rank, S tokens, d head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.context_parallel.cut import TokenCut


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_keys(k: Tensor, v: Tensor, cut: TokenCut) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, each (B, G, S/cp, d) -> (B, G, S, d), in one message. Collective over cp; blocks."""
    if k.is_meta:
        return tuple(torch.cat([each] * cut.group.size, dim=-2) for each in (k, v))  # type: ignore[return-value]
    found: tuple[Tensor, Tensor] = _GatherKeys.apply(k, v, cut)  # type: ignore[no-untyped-call]
    return found


class _GatherKeys(torch.autograd.Function):
    """All-gather of keys and values along the tokens; backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, cut: TokenCut) -> tuple[Tensor, Tensor]:
        ctx.cut, ctx.k_width, ctx.joined = cut, k.shape[-1], cut.from_ranks(k.device)
        part = torch.cat([k, v], dim=-1).movedim(-2, 0).contiguous()  # (S/cp, B, G, 2 d)
        whole = part.new_empty(cut.length, *part.shape[1:])
        cut.group.all_gather(whole, part).wait()
        both = in_sample_order(whole, ctx.joined).movedim(0, -2)  # (B, G, S, 2 d)
        return both[..., : ctx.k_width], both[..., ctx.k_width :]

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        cut = ctx.cut
        whole = in_rank_order(torch.cat([dk, dv], dim=-1).movedim(-2, 0), ctx.joined)  # (S, B, G, 2 d)
        part = whole.new_empty(cut.share, *whole.shape[1:])
        cut.group.reduce_scatter(part, whole).wait()
        part = part.movedim(0, -2)
        return part[..., : ctx.k_width], part[..., ctx.k_width :], None


def in_sample_order(whole: Tensor, joined: Tensor) -> Tensor:
    """Return tokens (S, B, ...) of rank 0, rank 1, .. in the order of the sample. ``joined``: (1 or B, S)."""
    if len(joined) == 1:
        return whole.index_select(0, joined[0])
    return whole.gather(0, _expanded(joined, whole))


def in_rank_order(whole: Tensor, joined: Tensor) -> Tensor:
    """Return tokens (S, B, ...) of the sample's order in that of rank 0, rank 1, ..: contiguous."""
    ranked = torch.empty_like(whole, memory_format=torch.contiguous_format)
    if len(joined) == 1:
        return ranked.index_copy_(0, joined[0], whole)
    return ranked.scatter_(0, _expanded(joined, whole), whole)


def _expanded(joined: Tensor, whole: Tensor) -> Tensor:
    """Return ``joined`` (B, S) as an index of the shape of ``whole``, (S, B, ...)."""
    index = joined.movedim(1, 0)
    return index.view(*index.shape, *[1] * (whole.dim() - 2)).expand(whole.shape)
