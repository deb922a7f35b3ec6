"""Sums of integer counts over the ranks that have the other tokens of the same samples."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Summing(Protocol):
    """Group of ranks, implemented by :class:`meshwright.mesh.comm.Group`."""

    def all_reduce(self, tensor: Tensor) -> Any:
        """All-reduce in place; the handle's ``wait`` blocks."""


def sum_tokens_over(module: nn.Module, group: Summing) -> None:
    """Extend a router's ``sum_tokens`` by a sum over ``group``, the ranks of an axis that cuts the tokens."""
    before: Any = getattr(module, "sum_tokens", None)
    if before is not None:
        module.sum_tokens = partial(_summed, group, before)  # type: ignore[assignment]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _summed(group: Summing, before: Any, counts: Tensor) -> Tensor:
    """All-reduce counts (B, E) int64 over the group. Blocks. Wire: 2 M (n-1)/n bytes, M = 8 B E."""
    total: Tensor = before(counts).contiguous()
    group.all_reduce(total).wait()
    return total
