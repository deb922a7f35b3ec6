"""AdamW on flat shards: torch's fused kernel, or its formula on states of another format.

m = m + (1 - beta1) (g - m)                             exp_avg
v = beta2 v + (1 - beta2) g^2                           exp_avg_sq
w = w (1 - rate decay) - rate m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.kernels import adamw_8bit
from meshwright.kernels.adamw_8bit import StepNumbers
from meshwright.optimizer.codecs import NUMBERS
from meshwright.optimizer.eight_bit import BlockCodec, computed_in
from meshwright.optimizer.element_wise import STEP, ElementWise
from meshwright.optimizer.layout import Shards


class FlatAdamW(ElementWise, torch.optim.AdamW):
    """torch's AdamW."""

    has_kernel = True

    @classmethod
    def build(cls, groups: list[dict[str, Any]], keys: Optimizer, shards: Shards) -> Self:
        """Build the optimizer over parameter groups; see :class:`ElementWise`."""
        return cls(groups, keys.spec.states, shards.allocate, betas=keys.betas, fused=True)

    def update(
        self,
        weights: Tensor,
        gradients: Tensor,
        states: Mapping[str, Tensor],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        numbers = _step_numbers(group, step)
        mean, square = states["exp_avg"], states["exp_avg_sq"]
        mean.lerp_(gradients, numbers.mix)
        square.mul_(numbers.beta2).addcmul_(gradients, gradients, value=numbers.fresh)
        weights.mul_(numbers.shrink)
        root = square.sqrt().div_(numbers.largest_root).add_(numbers.eps)
        weights.addcdiv_(mean, root, value=numbers.size)

    def update_in_kernel(
        self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], step: int
    ) -> bool:
        codec = group["codec"]
        if not isinstance(codec, BlockCodec):
            return False
        if not adamw_8bit.takes(parameter, codec.block_size):
            return False
        state, dtype = self.state[parameter], computed_in(parameter)
        moments = (*state["exp_avg"], *state["exp_avg_sq"])
        signed = codec.quantiser("signed", parameter.device, dtype)
        square = codec.quantiser("square", parameter.device, dtype)
        adamw_8bit.step_8bit(
            parameter.view(-1),
            gradient,
            moments,
            (*signed.tables, *square.tables),
            _step_numbers(group, step),
            codec.block_size,
        )
        return True

    def count(self, shard: Tensor, steps: int) -> dict[str, Any]:
        if self._codec_of[shard] is not NUMBERS:
            return super().count(shard, steps)
        # torch's fused kernel takes the count as a tensor
        return {STEP: torch.tensor(float(steps), dtype=torch.float32, device=shard.device)}


def _step_numbers(group: Mapping[str, Any], step: int) -> StepNumbers:
    """Return the scalars of optimizer step ``step``, counted from 0."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    return StepNumbers(
        mix=1 - beta1,
        beta2=beta2,
        fresh=1 - beta2,
        largest_root=(1 - beta2 ** (step + 1)) ** 0.5,
        eps=group["eps"],
        shrink=1 - rate * group["weight_decay"],
        size=-rate / (1 - beta1 ** (step + 1)),
    )
