"""Cast of a model's own loss to float32: the default loss is computed in it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def in_float32(
    loss: Callable[[Any, Tensor], Tensor] | None,
) -> Callable[[Any, Tensor], Tensor] | None:
    """Return ``loss`` with 16-bit tensors of its arguments (output, labels) cast to float32;
    None if there is none.
    """
    if loss is None:
        return None
    return lambda output, labels: loss(*tree_map(_widen, (output, labels)))


def _widen(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.is_floating_point() and leaf.itemsize == 2 else leaf
