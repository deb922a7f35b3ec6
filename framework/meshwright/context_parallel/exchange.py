"""Exchanges between context-parallel ranks around an attention core.

    parallel.cp_exchange = "keys"
    forward     (B, G, S/cp, d) of each rank -- all-gather -->     (B, G, S, d), in the order of the sample
    backward    this rank's (B, G, S/cp, d)  <-- reduce-scatter -- (B, G, S, d), the gradient by this rank's queries

    parallel.cp_exchange = "heads" (Ulysses, Jacobs et al. 2023)
    before      q, k, v (B, heads, S/cp, d)  -- all-to-all --> (B, heads/cp, S, d), in the order of the sample
    after       (B, H, S/cp, d)              <-- all-to-all -- (B, H/cp, S, d); backward: each all-to-all the other way

With "keys" each rank keeps its queries and gathers all keys. So any mask works, and each row of
scores is computed as in one process; grouped.py gathers the keys of some heads at a time. With
"heads" the core computes some heads for all tokens. Bytes on the wire of a rank, in forward and the
same in backward, with b bytes an element:

    keys        2 B S G d b (cp-1)/cp; in groups of heads backward gathers them again, as many bytes more
    heads       (2 H + 2 G) B S/cp d b (cp-1)/cp, of which H + 2 G before the core

Shapes: B samples, H query heads and G key-value heads of this rank before the exchange, S tokens, d
head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.context_parallel.cut import TokenCut
from meshwright.mesh.comm import CollectiveHandle


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_keys(k: Tensor, v: Tensor, cut: TokenCut) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, each (B, G, S/cp, d) -> (B, G, S, d), in one collective over cp.
    Blocks.
    """
    if k.is_meta:
        return tuple(torch.cat([tensor] * cut.group.size, dim=-2) for tensor in (k, v))  # type: ignore[return-value]
    gathered: tuple[Tensor, Tensor] = _GatherKeys.apply(k, v, cut)  # type: ignore[no-untyped-call]
    return gathered


class KeyGathering:
    """Handle of an all-gather over cp of keys and values, each (B, G, S/cp, d) -> (B, G, S, d),
    in one message.
    """

    def __init__(self, k: Tensor, v: Tensor, cut: TokenCut, joined: Tensor) -> None:
        """Post the all-gather. ``joined``: (1 or B, S), see :meth:`TokenCut.from_ranks`."""
        self._joined, self._k_width = joined, k.shape[-1]
        part = torch.cat([k, v], dim=-1).movedim(-2, 0).contiguous()  # (S/cp, B, G, 2 d)
        self._whole = part.new_empty(cut.length, *part.shape[1:])
        self._handle = (
            CollectiveHandle() if part.is_meta else cut.group.all_gather(self._whole, part)
        )

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens in the order of the sample. Blocks (on CUDA:
        the stream).
        """
        self._handle.wait()
        both = in_sample_order(self._whole, self._joined).movedim(0, -2)  # (B, G, S, 2 d)
        del self._whole
        return both[..., : self._k_width], both[..., self._k_width :]


class KeyScattering:
    """Handle of a reduce-scatter over cp of the gradients of keys and values, (B, G, S, d) -> (B,
    G, S/cp, d).
    """

    def __init__(self, dk: Tensor, dv: Tensor, cut: TokenCut, joined: Tensor) -> None:
        """Post the reduce-scatter. ``joined``: (1 or B, S), see :meth:`TokenCut.from_ranks`."""
        self._k_width = dk.shape[-1]
        whole = in_rank_order([dk.movedim(-2, 0), dv.movedim(-2, 0)], joined)  # (S, B, G, 2 d)
        self._part = whole.new_empty(cut.share, *whole.shape[1:])
        self._handle = (
            CollectiveHandle() if whole.is_meta else cut.group.reduce_scatter(self._part, whole)
        )

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values. Blocks (on CUDA: the stream)."""
        self._handle.wait()
        part = self._part.movedim(0, -2)
        return part[..., : self._k_width], part[..., self._k_width :]


class _GatherKeys(torch.autograd.Function):
    """All-gather of keys and values, (B, G, S/cp, d) -> (B, G, S, d);
    backward reduce-scatters their gradients.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, cut: TokenCut) -> tuple[Tensor, Tensor]:
        ctx.cut, ctx.joined = cut, cut.from_ranks(k.device)
        return KeyGathering(k, v, cut, ctx.joined).wait()

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        return *KeyScattering(dk, dv, ctx.cut, ctx.joined).wait(), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tokens_to_heads(tensors: Sequence[Tensor], cut: TokenCut) -> tuple[Tensor, ...]:
    """Exchange each (B, heads, S/cp, d) for (B, heads/cp, S, d) in one all-to-all.
    Collective over cp; blocks.
    """
    cp = cut.group.size
    if tensors[0].is_meta:
        return tuple(
            torch.cat([tensor.narrow(1, 0, tensor.shape[1] // cp)] * cp, dim=-2)
            for tensor in tensors
        )
    exchanged: tuple[Tensor, ...] = _TokensToHeads.apply(cut, *tensors)  # type: ignore[no-untyped-call]
    return exchanged


@torch.compiler.disable  # type: ignore[untyped-decorator]
def heads_to_tokens(mixed: Tensor, cut: TokenCut) -> Tensor:
    """Exchange (B, H/cp, S, d) for (B, H, S/cp, d) in an all-to-all. Collective over cp; blocks."""
    if mixed.is_meta:
        return torch.cat([mixed.narrow(-2, 0, cut.share)] * cut.group.size, dim=1)
    exchanged: Tensor = _HeadsToTokens.apply(mixed, cut)  # type: ignore[no-untyped-call]
    return exchanged


class _TokensToHeads(torch.autograd.Function):
    """All-to-all (B, heads, S/cp, d) -> (B, heads/cp, S, d);
    backward is :class:`_HeadsToTokens`.
    """

    @staticmethod
    def forward(ctx: Any, cut: TokenCut, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cut, ctx.joined = cut, cut.from_ranks(tensors[0].device)
        return _to_heads(tensors, cut, ctx.joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, *tuple[Tensor, ...]]:
        return None, *_to_tokens(gradients, ctx.cut, ctx.joined)


class _HeadsToTokens(torch.autograd.Function):
    """All-to-all (B, heads/cp, S, d) -> (B, heads, S/cp, d);
    backward is :class:`_TokensToHeads`.
    """

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cut: TokenCut) -> Tensor:
        ctx.cut, ctx.joined = cut, cut.from_ranks(mixed.device)
        return _to_tokens([mixed], cut, ctx.joined)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_heads([gradient], ctx.cut, ctx.joined)[0], None


def _to_heads(tensors: Sequence[Tensor], cut: TokenCut, joined: Tensor) -> tuple[Tensor, ...]:
    """Exchange (B, heads, S/cp, d) for (B, heads/cp, S, d),
    the tokens in the order of the sample.
    """
    cp = cut.group.size
    parts = [
        tensor.reshape(len(tensor), cp, -1, *tensor.shape[2:]).permute(1, 3, 0, 2, 4)
        for tensor in tensors
    ]  # (cp, S/cp, B, heads/cp, d)
    ranked = _all_to_all(cut, torch.cat([part.flatten(3) for part in parts], dim=-1)).flatten(0, 1)
    ordered = torch.split(
        in_sample_order(ranked, joined), [part.shape[3] * part.shape[4] for part in parts], dim=-1
    )
    return tuple(
        tensor.reshape(*tensor.shape[:-1], *part.shape[3:]).permute(1, 2, 0, 3).contiguous()
        for tensor, part in zip(ordered, parts, strict=True)
    )


def _to_tokens(tensors: Sequence[Tensor], cut: TokenCut, joined: Tensor) -> tuple[Tensor, ...]:
    """Exchange (B, heads/cp, S, d) for (B, heads, S/cp, d), this rank's tokens."""
    sizes = [(tensor.shape[1], tensor.shape[3]) for tensor in tensors]
    # (S, B, F)
    whole = in_rank_order([tensor.permute(2, 0, 1, 3).flatten(2) for tensor in tensors], joined)
    ranked = _all_to_all(cut, whole.view(cut.group.size, cut.share, *whole.shape[1:]))
    # (cp, S/cp, B, heads/cp d)
    parts = torch.split(ranked, [heads * width for heads, width in sizes], dim=-1)
    return tuple(
        part.reshape(*part.shape[:-1], *size).permute(2, 0, 3, 1, 4).flatten(1, 2)
        for part, size in zip(parts, sizes, strict=True)
    )


def _all_to_all(cut: TokenCut, parts: Tensor) -> Tensor:
    """Send part r to rank r and return the parts from all ranks, (cp, ...) both.
    Collective over cp; blocks.
    """
    sent = parts.contiguous().view(-1)
    received = torch.empty_like(sent)
    runs = [sent.numel() // cut.group.size] * cut.group.size
    cut.group.all_to_all(received, sent, runs, runs).wait()
    return received.view(parts.shape)


def in_sample_order(whole: Tensor, joined: Tensor) -> Tensor:
    """Reorder tokens (S, B, ...) of rank 0, rank 1, .. to the order of the sample.

    ``joined``: (1 or B, S).
    """
    if len(joined) == 1:
        return whole.index_select(0, joined[0])
    return whole.gather(0, _expanded(joined, whole))


def in_rank_order(parts: Sequence[Tensor], joined: Tensor) -> Tensor:
    """Reorder tensors (S, B, .., d) from the sample's order to rank 0, rank 1, ..;
    concatenate them along d.
    """
    widths = [part.shape[-1] for part in parts]
    ranked = parts[0].new_empty(*parts[0].shape[:-1], sum(widths))
    for part, place in zip(parts, torch.split(ranked, widths, dim=-1), strict=True):
        if len(joined) == 1:
            place.index_copy_(0, joined[0], part)
        else:
            place.scatter_(0, _expanded(joined, part), part)
    return ranked


def _expanded(joined: Tensor, whole: Tensor) -> Tensor:
    """Return ``joined`` (B, S) as an index of the shape of ``whole``, (S, B, ...)."""
    index = joined.movedim(1, 0)
    return index.view(*index.shape, *[1] * (whole.dim() - 2)).expand(whole.shape)
