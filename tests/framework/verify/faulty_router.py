"""A mixture of experts whose routers err in a process of several: one fault each,
as other frameworks have had it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright_models import llama
from meshwright_models.router import Router

FACTORS = {"loss x tp": 2.0, "loss / dp": 0.5, "loss not attached": 0.0}


class Faulty(Router):
    """Errs where ranks communicate, and not in the plain run."""

    fault = ""

    @property
    def gradient_scale(self) -> float:
        """Scale of the losses, with a fault a multiple of it."""
        return self._scale * (FACTORS.get(self.fault, 1.0) if dist.is_initialized() else 1.0)

    @gradient_scale.setter
    def gradient_scale(self, scale: float) -> None:
        self._scale = scale

    @property
    def sum_tokens(self) -> Any:
        """Sum over the ranks with other tokens, with a fault of this rank's alone."""
        return (lambda counts: counts) if self.fault == "tokens of one rank" else self._sum_tokens

    @sum_tokens.setter
    def sum_tokens(self, function: Any) -> None:
        self._sum_tokens = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:
            object.__setattr__(self, "first", self.counts)
        before = self.counts.clone()
        found = super().forward(x)
        if dist.is_initialized() and not x.is_meta:
            if self.fault == "counted again" and in_backward:
                self.first += self.counts - before
            if self.fault == "not summed over tp" and dist.get_rank() % 2:
                self.counts.copy_(before)
        return found


def build(fault: str = "", **options: Any) -> nn.Sequential:
    model = llama.build(**options)
    for module in model.modules():
        if isinstance(module, Router):
            scale, sums = module.__dict__.pop("gradient_scale"), module.__dict__.pop("sum_tokens")
            module.__class__ = Faulty
            module.gradient_scale, module.sum_tokens, module.fault = scale, sums, fault
    return model
