"""Multi-token prediction with heads in parallel on the trunk (Gloeckle et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """Last layer: x (B, S, D) -> logits (B, S, V) of the next token, of the one after it, ...; each from its own."""

    def __init__(self, vocab_size: int, width: int, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.out = nn.ModuleList(nn.Linear(width, vocab_size, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(out(x + torch.tanh(up(x))) for up, out in zip(self.up, self.out, strict=True))


class Mixing(nn.Module):
    """Mean over the tokens so far, and a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(vocab_size: int = 61, width: int = 16, depth: int = 2, count: int = 3, heads: Any = None) -> nn.Sequential:
    """``heads``: what the model declares in place of weights 1 and shifts 0, 1, ...; "whole": no head is split."""
    model = nn.Sequential()
    model.add_module("embedding", nn.Embedding(vocab_size, width))
    for i in range(depth):
        model.add_module(f"block{i}", Mixing(width))
    model.add_module("heads", Heads(vocab_size, width, count))
    model.sharding_plan = {"embedding": "vocab", "block*.up": "column", "block*.down": "row", "heads.out.*": "vocab"}
    if heads in ("whole", "first"):
        del model.sharding_plan["heads.out.*"]
    if heads == "first":
        model.sharding_plan["heads.out.0"] = "vocab"
    declared = isinstance(heads, list | int)
    model.loss_heads = heads if declared else [(shift, 1.0 / (1 + shift)) for shift in range(count)]
    return model


def with_own_loss() -> nn.Sequential:
    """Two ways to say what the loss is."""
    model = build()
    model.loss = lambda output, labels: output[0].logsumexp(-1)
    return model
