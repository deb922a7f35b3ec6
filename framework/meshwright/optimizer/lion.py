"""Lion on flat shards, element by element (Chen et al. 2023,
"Symbolic Discovery of Optimization Algorithms").

    c = beta1 m + (1 - beta1) g
    w = w (1 - rate decay) - rate c / max(|c|, eps)         the paper's sign(c) where |c| >= eps
    m = beta2 m + (1 - beta2) g                             the only state

NOTE [sign of a rounding error]: a gradient that is zero in exact arithmetic, such as that of the
bias of attention's keys, is 1e-20 in practice, and the order of a sum decides its sign. The paper's
sign would move such a weight by the whole learning rate, in another direction on each layout. Below
``eps`` the update is therefore c / eps: continuous, so that it is as small as the error. Elements
of a real gradient are orders of magnitude larger, and get the sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.optimizer.element_wise import ElementWise


class ShardedLion(ElementWise):
    """Lion, with weight decay that is independent of the gradient, as in AdamW."""

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        states: Mapping[str, Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        rate, (beta1, beta2) = group["lr"], group["betas"]
        moments = states["exp_avg"]
        eps = max(group["eps"], torch.finfo(weights.dtype).tiny)
        weights.mul_(1 - rate * group["weight_decay"])
        direction = moments.lerp(gradients, 1 - beta1)
        weights.addcdiv_(direction, direction.abs().clamp_min_(eps), value=-rate)
        moments.lerp_(gradients, 1 - beta2)
