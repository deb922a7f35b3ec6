"""Tokens of a router on a rank: sums of counts over the ranks with other tokens of the same samples, gather and cut.

Axes cut the tokens one after the other, context parallelism first. A sum goes over all of them, a gather begins with
the last cut, and taking a rank's own tokens with the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Tokens(Protocol):
    """Group of ranks, implemented by :class:`meshwright.mesh.comm.Group`."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Any:
        """All-reduce in place; the handle's ``wait`` blocks."""

    def all_gather(self, out: Tensor, part: Tensor) -> Any:
        """All-gather along dim 0; the handle's ``wait`` blocks."""


def own_run(group: Tokens, whole: Tensor) -> Tensor:
    """Return this rank's run of the tokens of an axis that cuts them in runs: (B, S, ...) -> (B, S/n, ...)."""
    return whole.chunk(group.size, dim=1)[group.rank]


def share_router_tokens(
    module: nn.Module,
    group: Tokens,
    take: Callable[[Tensor], Tensor] | None = None,
    in_order: Callable[[Tensor], Tensor] = lambda ranked: ranked,
) -> None:
    """Extend a router's functions of its tokens by ``group``, the ranks of an axis that cuts them.

    ``take``: (B, S, ...) -> (B, S/n, ...), this rank's tokens; None: its run. ``in_order``: puts tokens (S, B, ...) of
    rank 0, rank 1, .. into the order of the sample. A router of the user's own may lack any of the functions.
    """
    for name, extended in (
        ("sum_tokens", partial(partial, _summed, group)),
        ("whole_samples", partial(partial, _gathered, group, in_order)),
        ("own_tokens", partial(partial, _taken, take or partial(own_run, group))),
    ):
        before = getattr(module, name, None)
        if before is not None:
            setattr(module, name, extended(before))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _summed(group: Tokens, before: Any, counts: Tensor) -> Tensor:
    """All-reduce counts (B, E) int64 over the group. Blocks. Wire: 2 M (n-1)/n bytes, M = 8 B E."""
    total: Tensor = before(counts).contiguous()
    group.all_reduce(total).wait()
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gathered(group: Tokens, in_order: Callable[[Tensor], Tensor], before: Any, part: Tensor) -> Tensor:
    """All-gather tokens, (B, S/n, c) -> (B, S, c), over the group, then over those of ``before``. Blocks.

    Wire: M (n-1)/n bytes, M those of the whole.
    """
    if part.is_meta:
        whole: Tensor = before(torch.cat([part] * group.size, dim=1))
        return whole
    tokens = part.movedim(1, 0).contiguous()  # (S/n, B, c)
    ranked = tokens.new_empty(group.size * tokens.shape[0], *tokens.shape[1:])
    group.all_gather(ranked, tokens).wait()
    whole = before(in_order(ranked).movedim(0, 1))
    return whole


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _taken(take: Callable[[Tensor], Tensor], before: Any, whole: Tensor) -> Tensor:
    """Return this rank's tokens of whole samples: those of the cut ``before``, then of this one. No communication."""
    return take(before(whole))
