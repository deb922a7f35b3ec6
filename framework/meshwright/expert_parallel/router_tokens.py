"""A router's tokens when tp or cp cuts the samples: sums of counts, whole samples, this rank's own
tokens.

A router needs more than its rank's tokens: a balance loss counts those of whole samples, and an
expert's capacity goes to the highest scores among them. It calls three functions of its own for
that, which return their argument in plain torch and communicate over each cut here. tp and cp
import this file, expert parallelism does not: a router has no expert weights.

    cp cuts the sample     own_tokens: cp's cut, then tp's     whole_samples: tp's gather, then cp's
    tp cuts each part      sum_tokens: over tp and cp
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.mesh.comm import Group


def share_router_tokens(
    router: Any,
    group: Group,
    take: Callable[[Tensor], Tensor] | None = None,
    in_order: Callable[[Tensor], Tensor] = lambda ranked: ranked,
) -> None:
    """Extend a router's token functions by ``group``,
    ranks with different tokens of the same samples.

    A user's own router may lack any of the functions.

    Args:
        take: (B, S, ...) -> (B, S/n, ...), this rank's tokens; None: :func:`_own_run`.
        in_order: puts tokens (S, B, ...) of rank 0, rank 1, .. into the order of the sample.
    """
    take = take or partial(_own_run, group)
    if getattr(router, "sum_tokens", None) is not None:
        router.sum_tokens = partial(_sum_counts, group, router.sum_tokens)
    if getattr(router, "whole_samples", None) is not None:
        router.whole_samples = partial(_gather_tokens, group, in_order, router.whole_samples)
    if getattr(router, "own_tokens", None) is not None:
        router.own_tokens = partial(_take_tokens, take, router.own_tokens)


def _own_run(group: Group, whole: Tensor) -> Tensor:
    """Return this rank's contiguous part of the tokens: (B, S, ...) -> (B, S/n, ...)."""
    return whole.chunk(group.size, dim=1)[group.rank]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sum_counts(group: Group, before: Any, counts: Tensor) -> Tensor:
    """All-reduce counts (B, E) int64 over the group. Blocks. Wire: 2 M (n-1)/n bytes, M = 8 B E."""
    total: Tensor = before(counts).contiguous()
    group.all_reduce(total).wait()
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_tokens(
    group: Group, in_order: Callable[[Tensor], Tensor], before: Any, part: Tensor
) -> Tensor:
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
def _take_tokens(take: Callable[[Tensor], Tensor], before: Any, whole: Tensor) -> Tensor:
    """Return this rank's tokens of whole samples: first the cut of ``before``, then ``take``.
    No communication.
    """
    return take(before(whole))
