"""Optimizers of the plain reference run that torch lacks (schedule-free AdamW, Lion),
from their papers' formulas.

They step whole parameters, and share no code with the layouts' optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.config import Optimizer
from meshwright.optimizer import peak_rate


class PlainScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW as in its authors' reference code: x, y and z are stored,
    and x averages z by lr_max^2.
    """

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        super().__init__(groups, {"lr": peak_rate(config), "eps": config.eps})
        self._betas = config.betas
        self.averages = {p: p.detach().clone() for group in groups for p in group["params"]}
        """Averaged weights x, which evaluation uses."""
        self._z = {p: p.detach().clone() for p in self.averages}
        for p in self.averages:
            self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        self._taken = 0
        self._sums: dict[int, tuple[float, float]] = {}
        """Group index -> (largest learning rate so far, sum of the averaging weights)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters."""
        beta1, beta2 = self._betas
        self._taken += 1
        for index, group in enumerate(self.param_groups):
            rate, (largest, total) = group["lr"], self._sums.get(index, (0.0, 0.0))
            largest = max(largest, rate)
            total += largest**2
            self._sums[index] = largest, total
            c = largest**2 / total
            for y in group["params"]:
                x, z, v = self.averages[y], self._z[y], self.state[y]["exp_avg_sq"]
                v.copy_(beta2 * v + (1 - beta2) * y.grad**2)
                corrected = v / (1 - beta2**self._taken)
                z -= rate * (y.grad / (corrected.sqrt() + group["eps"]) + group["weight_decay"] * y)
                x.copy_((1 - c) * x + c * z)
                y.copy_((1 - beta1) * z + beta1 * x)


@contextmanager
def averaged(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, nn.Parameter],
    parameters: Mapping[str, nn.Parameter],
) -> Iterator[None]:
    """Put a schedule-free optimizer's averaged weights into ``parameters`` within the context;
    call under no_grad.
    """
    changed = parameters if isinstance(optimizer, PlainScheduleFree) else {}
    kept = {name: parameter.clone() for name, parameter in changed.items()}
    for name, parameter in changed.items():
        parameter.copy_(optimizer.averages[masters[name]])  # type: ignore[attr-defined]
    yield
    for name, parameter in changed.items():
        parameter.copy_(kept[name])


class PlainLion(torch.optim.Optimizer):
    """Lion: algorithm 2 of Chen et al. 2023, with c / eps instead of sign(c) where abs(c) < eps."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        super().__init__(groups, {"lr": peak_rate(config), "eps": config.eps})
        self._betas = config.betas
        for group in groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters."""
        beta1, beta2 = self._betas
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                momentum = self.state[parameter]["exp_avg"]
                c = beta1 * momentum + (1 - beta1) * gradient
                sign = torch.where(c.abs() < group["eps"], c / group["eps"], torch.sign(c))
                parameter -= group["lr"] * (sign + group["weight_decay"] * parameter)
                momentum.copy_(beta2 * momentum + (1 - beta2) * gradient)
