"""A model that does on CUDA what a GPU run should not do."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

V, D = 24, 8


class Faulty(nn.Module):
    """Linear layer with one fault, on CUDA alone: no check on another device sees it."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not y.is_cuda:
            return y
        if self.fault == "item":
            return y * (2.0 if y.detach().sum().item() > 0 else 1.0)
        if self.fault == "branch":
            return y * 2.0 if (y.detach() > 0).any() else y
        if self.fault == "copy":
            return y + torch.ones(D).to(y.device)
        if self.fault == "host collective":
            dist.all_reduce(torch.zeros(1))
        if self.fault == "wrong device":
            return y + torch.ones(D)
        return y


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


def build(fault: str) -> nn.Sequential:
    """Embedding, the faulty layer, and a head."""
    model = nn.Sequential(nn.Embedding(V, D), Faulty(fault), nn.Linear(D, V))
    model.loss = loss  # type: ignore[assignment]
    return model
