"""A model's own loss, computed in float32 as the default one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def in_float32(loss: Callable[[Any, Tensor], Tensor] | None) -> Callable[[Any, Tensor], Tensor] | None:
    """Return a function of (output, labels) that passes 16-bit ones to ``loss`` in float32; None for no loss."""
    return None if loss is None else lambda output, labels: loss(*tree_map(_widen, (output, labels)))


def _widen(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.is_floating_point() and leaf.itemsize == 2 else leaf
