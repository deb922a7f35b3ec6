"""Optimizers of the plain reference run that torch does not have: formulas of their papers, on whole parameters.

They share no code with the layouts' optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.config import Optimizer


class PlainLion(torch.optim.Optimizer):
    """Lion: algorithm 2 of Chen et al. 2023, with the sign proportional to its argument below eps."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        super().__init__(groups, {"lr": config.learning_rate, "eps": config.eps})
        self._betas = config.betas
        self._momentum: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters."""
        beta1, beta2 = self._betas
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                momentum = self._momentum.get(parameter, torch.zeros_like(parameter))
                c = beta1 * momentum + (1 - beta1) * gradient
                sign = torch.where(c.abs() < group["eps"], c / group["eps"], torch.sign(c))
                parameter -= group["lr"] * (sign + group["weight_decay"] * parameter)
                self._momentum[parameter] = beta2 * momentum + (1 - beta2) * gradient
