"""Schedule-free AdamW on flat shards (Defazio et al. 2024, "The Road Less Scheduled"): averaged weights, no decay.

    z    iterate of AdamW without momentum              z = z - rate (g / (sqrt(v) + eps) + decay y)
    x    weights of evaluation, an average of all z     x = (1 - c) x + c z
    y    weights at which gradients are taken           y = (1 - beta1) z + beta1 x

NOTE [which weights are where]: the master weights are y, so that forward and backward need no copy. z and v are the
state, and x follows from y and z. Validation replaces y by x and then restores y from a copy: recomputed, y would
differ by a rounding, and training would depend on when it validates. A checkpoint holds x as its weights and masters,
because evaluation, sampling and export read those; y is a state of its own there, from which a resume is exact.

A step's weight in the average is the square of its learning rate over the peak. Both depend on the number of steps
taken (skipped ones are not counted) and on ``optimizer.warmup_steps`` alone: there is nothing to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.optimizer.pieces import ParameterwiseOptimizer, pieces_of

GRADIENT_POINT = "y"
"""Name in a checkpoint of y, the weights at which gradients are taken."""


def average_weight(step: int, warmup_steps: int) -> float:
    """Return c of optimizer step ``step`` (from 0): its weight in the average over the sum of all weights so far."""
    taken, warm = step + 1, max(warmup_steps, 1)
    n = min(taken, warm)
    total = n * (n + 1) * (2 * n + 1) / (6 * warm**2) + (taken - n)
    return float((n / warm) ** 2 / total)


class ShardedScheduleFree(ParameterwiseOptimizer):
    """Schedule-free AdamW; the parameters are y."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        """Build the optimizer. ``groups``: each with "lr", "weight_decay" and "eps"."""
        super().__init__(groups, {"betas": config.betas})
        self._beta1, self._warmup_steps = config.betas[0], config.warmup_steps

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), rate, state = group["betas"], group["lr"], self.state[parameter]
        if not state:
            state |= {"exp_avg_sq": torch.zeros_like(parameter), "z": torch.empty_like(parameter), "step": 0}
        taken = state["step"]
        if taken == 0:
            state["z"].copy_(parameter)
        state["step"] = taken + 1
        c, correction = average_weight(taken, self._warmup_steps), (1 - beta2 ** (taken + 1)) ** 0.5
        for y, grads, z, v in pieces_of(parameter, gradient, state["z"], state["exp_avg_sq"]):
            v.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
            grads.div_(v.sqrt().div_(correction).add_(group["eps"])).add_(y, alpha=group["weight_decay"])
            y.lerp_(z, c).add_(grads, alpha=rate * (beta1 * (1 - c) - 1))
            z.sub_(grads, alpha=rate)

    def averaged(self, parameter: Tensor) -> Tensor:
        """Return x of a parameter, a new tensor."""
        state = self.state.get(parameter)
        if not state or state["step"] == 0:
            return parameter.detach().clone()
        return torch.lerp(parameter.detach(), state["z"], 1 - 1 / self._beta1)


class GatheredShard(NamedTuple):
    """One flat shard of weights, and the collectives before and after it is replaced."""

    parameter: Tensor
    wait: Callable[[], None]
    """Function that blocks until the all-gather posted last is done."""
    gather: Callable[[], None]
    """Function that posts the all-gather of the replaced weights. Does not block."""


@contextmanager
def exchanged_weights(optimizer: torch.optim.Optimizer, shards: Sequence[GatheredShard]) -> Iterator[None]:
    """Replace y by x within the context; do nothing for other optimizers. Collective over the shard groups.

    Holds a copy of the shards meanwhile.
    """
    if not isinstance(optimizer, ShardedScheduleFree):
        yield
        return
    kept = [shard.parameter.detach().clone() for shard in shards]
    _replace(shards, map(optimizer.averaged, (shard.parameter for shard in shards)))
    try:
        yield
    finally:
        _replace(shards, kept)


@torch.no_grad()
def _replace(shards: Sequence[GatheredShard], values: Any) -> None:
    """Copy ``values`` to the shards one by one, and post the all-gather of each."""
    for shard, value in zip(shards, values, strict=True):
        shard.wait()
        shard.parameter.copy_(value)
        shard.gather()
