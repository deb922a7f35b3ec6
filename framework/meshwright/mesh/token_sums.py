"""Communication of a router whose samples are cut over ranks: sums of counts, whole samples, a rank's own tokens.

Context parallelism cuts the tokens first, then sequence parallelism cuts each part. A sum covers both groups. A gather
undoes the last cut first; taking a rank's own tokens applies the first cut first.
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
    """Return this rank's contiguous part of the tokens: (B, S, ...) -> (B, S/n, ...)."""
    return whole.chunk(group.size, dim=1)[group.rank]


def share_router_tokens(
    module: nn.Module,
    group: Tokens,
    take: Callable[[Tensor], Tensor] | None = None,
    in_order: Callable[[Tensor], Tensor] = lambda ranked: ranked,
) -> None:
    """Extend a router's token functions by ``group``, ranks with different tokens of the same samples.

    ``take``: (B, S, ...) -> (B, S/n, ...), this rank's tokens; None: :func:`own_run`. ``in_order``: puts tokens
    (S, B, ...) of rank 0, rank 1, .. into the order of the sample. A user's own router may lack any of the functions.
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
    """All-gather tokens, (B, S/n, c) -> (B, S, c), over the group, then apply ``before``. Blocks.

    Wire: M (n-1)/n bytes, M = bytes of (B, S, c).
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
    """Return this rank's tokens of whole samples: first the cut of ``before``, then ``take``. No communication."""
    return take(before(whole))
