"""AdamW over flat shards (torch's own, fused), and clipping by the whole gradient's norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from framework.config.schema import Optimizer

NORM_PIECE = 2**16
"""Elements whose squares are summed in float32; the pieces' sums are added in float64. torch's CPU kernel loses 1e-3 of
the norm of a flat tensor of 4 million elements, so that the norm, and with it clipping, would depend on the layout.
CUDA's sums pairwise: there whole shards are as good, and a billion elements would be 15,000 pieces."""


class Shard(NamedTuple):
    """One flat tensor to step, its gradient, and what is known of its parameters."""

    weights: Tensor
    gradient: Tensor
    decays: bool
    counted: bool
    """True on the one rank that counts these elements in the gradient norm."""


class FlatAdamW:
    """torch.optim.AdamW with one parameter per shard: decayed shards in one group, the others in another."""

    def __init__(self, shards: Sequence[Shard], config: Optimizer) -> None:
        self.shards = list(shards)
        self.parameters = [nn.Parameter(shard.weights) for shard in self.shards]
        groups = [
            {
                "params": [p for p, shard in zip(self.parameters, self.shards, strict=True) if shard.decays is decays],
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self.adamw = torch.optim.AdamW(
            groups,  # a stage of activations alone has no parameters: torch takes empty groups, but no empty list
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def square_norm(self) -> Tensor:
        """Sum of squares of the gradient elements that this rank counts; float64 scalar on the shards' device."""
        return self._square_norm(counted=True)

    def spare_square_norm(self) -> Tensor:
        """The same of those that another rank counts while this one does nothing: of a copy that only here is not
        finite, the whole gradient's norm knows nothing."""
        return self._square_norm(counted=False)

    def _square_norm(self, *, counted: bool) -> Tensor:
        pieces = [
            piece
            for shard in self.shards
            if shard.counted is counted and shard.gradient.numel()
            for piece in (torch.split(shard.gradient, NORM_PIECE) if shard.gradient.is_cpu else (shard.gradient,))
        ]
        if not pieces:
            device = self.shards[0].gradient.device if self.shards else torch.device("cpu")
            return torch.zeros((), dtype=torch.float64, device=device)
        norms = torch._foreach_norm(pieces, 2.0)
        return torch.stack(list(norms)).double().square().sum()

    def step(self, learning_rate: float, gradient_factor: float) -> None:
        """One AdamW step at this learning rate, with every gradient multiplied by ``gradient_factor`` first."""
        gradients = [shard.gradient for shard in self.shards]
        if gradients and gradient_factor != 1.0:
            torch._foreach_mul_(gradients, gradient_factor)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()

    def moments(self, index: int) -> tuple[Tensor, Tensor, int]:
        """(exp_avg, exp_avg_sq, steps taken) of shard ``index``; zeros before the first step."""
        state = self.adamw.state.get(self.parameters[index], {})
        if not state:
            zero = torch.zeros_like(self.shards[index].weights)
            return zero, zero.clone(), 0
        return state["exp_avg"], state["exp_avg_sq"], int(state["step"].item())

    def restore(self, index: int, exp_avg: Tensor, exp_avg_sq: Tensor, steps: int) -> None:
        """Inverse of :meth:`moments`; the tensors are kept, not copied."""
        weights = self.shards[index].weights
        self.adamw.state[self.parameters[index]] = {
            "step": torch.tensor(float(steps), dtype=torch.float32, device=weights.device),
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }


def clip_factor(norm: float, clip_norm: float) -> float:
    """What gradients of this norm are multiplied by (torch's ``clip_grad_norm_``: clip / (norm + 1e-6), at most 1)."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0
