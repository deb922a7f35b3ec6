"""A mixture of experts whose routers choose otherwise where ranks communicate, as at near ties,
or err otherwise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from meshwright_models import llama
from meshwright_models.experts import MoE
from meshwright_models.router import Router


class Straying(Router):
    """Takes another expert for one token of each sample, or another scale of the weights,
    where ranks communicate.
    """

    fault = ""

    def _highest(self, scores: Tensor) -> Tensor:
        ids = super()._highest(scores)
        if self.fault == "choice" and dist.is_initialized() and not ids.is_meta:
            taken, free = ids[:, 0, -1], self.routing.num_experts
            ids[:, 0, -1] = (taken + 1 + (ids[:, 0, 0] == (taken + 1) % free)) % free
        return ids

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().choose(scores)
        return ids, weights * 1.5 if self.fault == "numbers" and dist.is_initialized() else weights


class OwnRouter(nn.Module):
    """A router as docs/mixture-of-experts.md has it."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.routing = SimpleNamespace(num_experts=num_experts, top_k=top_k)
        self.route_ids = self.own_tokens = lambda tensor: tensor
        self.linear = nn.Linear(hidden_size, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.linear(x).softmax(-1)
        ids = self.route_ids(scores.topk(self.routing.top_k).indices)
        return ids, scores.gather(-1, ids)


def build_own(**options: Any) -> nn.Sequential:
    """Llama with routers of the user's own."""
    model = llama.build(**options)
    for module in model.modules():
        if isinstance(module, MoE):
            chosen = module.router.routing
            module.router = OwnRouter(options["hidden_size"], chosen.num_experts, chosen.top_k)  # type: ignore
    return model


def build(fault: str = "", **options: Any) -> nn.Sequential:
    """Llama with such routers."""
    model = llama.build(**options)
    for module in model.modules():
        if isinstance(module, Router):
            module.__class__ = Straying
            module.fault = fault
    return model
