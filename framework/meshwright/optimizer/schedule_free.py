"""Schedule-free AdamW on flat shards (Defazio et al. 2024, "The Road Less Scheduled"):
averaged weights, no decay.

    z    iterate of AdamW without momentum              z = z - rate (g / (sqrt(v) + eps) + decay y)
    x    weights of evaluation, an average of all z     x = (1 - c) x + c z
    y    weights at which gradients are taken           y = (1 - beta1) z + beta1 x

NOTE [which weights are where]: the master weights are y, so that forward and backward need no copy.
z and v are the state, and x follows from y and z. Validation replaces y by x and then restores y
from a copy: recomputed, y would differ by a rounding, and training would depend on when it
validates. A checkpoint holds x as its weights and masters, because evaluation, sampling and export
read those; y is a state of its own there, from which a resume is exact.

A step's weight in the average is the square of its learning rate over the peak. Both depend on the
number of steps taken (skipped ones are not counted) and on ``optimizer.warmup_steps`` alone: there
is nothing to save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.optimizer.element_wise import STEP, ElementWise
from meshwright.optimizer.layout import Shards

GRADIENT_POINT = "y"
"""Name in a checkpoint of y, the weights at which gradients are taken."""


def average_weight(step: int, warmup_steps: int) -> float:
    """Return c of optimizer step ``step`` (from 0):
    its weight in the average over the sum of all weights so far.
    """
    taken, warm = step + 1, max(warmup_steps, 1)
    n = min(taken, warm)
    total = n * (n + 1) * (2 * n + 1) / (6 * warm**2) + (taken - n)
    return float((n / warm) ** 2 / total)


class ShardedScheduleFree(ElementWise):
    """Schedule-free AdamW; the parameters are y."""

    @classmethod
    def build(cls, groups: list[dict[str, Any]], keys: Optimizer, shards: Shards) -> Self:
        """Build the optimizer over parameter groups; see :class:`ElementWise`."""
        built = super().build(groups, keys, shards)
        built._beta1, built._warmup_steps = keys.betas[0], keys.warmup_steps
        return built

    _beta1: float
    _warmup_steps: int

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        states: Mapping[str, Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        rate, (beta1, beta2) = group["lr"], group["betas"]
        y, z, square = weights, states["z"], states["exp_avg_sq"]
        if step == 0:
            z.copy_(y)
        c = average_weight(step, self._warmup_steps)
        correction = (1 - beta2 ** (step + 1)) ** 0.5
        square.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        gradients.div_(square.sqrt().div_(correction).add_(group["eps"]))
        gradients.add_(y, alpha=group["weight_decay"])
        y.lerp_(z, c).add_(gradients, alpha=rate * (beta1 * (1 - c) - 1))
        z.sub_(gradients, alpha=rate)

    def read(self, shard: Tensor) -> dict[str, Tensor]:
        """Return the states, and y as another one: a checkpoint has x as its weights."""
        return {**super().read(shard), GRADIENT_POINT: shard.detach()}

    def averaged(self, shard: Tensor) -> Tensor:
        """Return x of a shard, a new tensor."""
        state = self.state.get(shard)
        if not state or state[STEP] == 0:
            return shard.detach().clone()
        return torch.lerp(shard.detach(), state["z"], 1 - 1 / self._beta1)
