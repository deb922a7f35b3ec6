"""SGD with momentum on flat shards: torch's fused kernel, or its formula on a momentum of another
format.

    b = momentum b + g + decay w            the first step: b = g + decay w
    w = w - rate b
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.optimizer.codecs import NUMBERS
from meshwright.optimizer.element_wise import ElementWise
from meshwright.optimizer.layout import Shards


class FlatSGD(ElementWise, torch.optim.SGD):
    """torch's SGD."""

    has_kernel = True
    in_torch = {"momentum": "momentum_buffer"}

    @classmethod
    def build(cls, groups: list[dict[str, Any]], keys: Optimizer, shards: Shards) -> Self:
        """Build the optimizer over parameter groups; see :class:`ElementWise`."""
        return cls(groups, keys.states, shards.allocate, momentum=keys.momentum, fused=True)

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        states: Mapping[str, Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        gradients.add_(weights, alpha=group["weight_decay"])
        momentum = states["momentum"]
        momentum.mul_(group["momentum"]).add_(gradients)
        weights.sub_(momentum, alpha=group["lr"])

    def count(self, shard: Tensor, steps: int) -> dict[str, Any]:
        return {} if self._codec_of[shard] is NUMBERS else super().count(shard, steps)
