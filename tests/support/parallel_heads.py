"""Model with multi-token prediction by parallel heads on one trunk (Gloeckle et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """Last layer: x (B, S, D) -> one (B, S, V) of logits per head, for the next token,
    the one after it, ...
    """

    def __init__(self, vocab_size: int, width: int, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.out = nn.ModuleList(nn.Linear(width, vocab_size, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(out(x + torch.tanh(up(x))) for up, out in zip(self.up, self.out, strict=True))


class Mixing(nn.Module):
    """Residual MLP with a norm, (B, S, D) -> (B, S, D). It mixes features, not tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(
    vocab_size: int = 61, width: int = 16, depth: int = 2, count: int = 3, heads: Any = None
) -> nn.Sequential:
    """Build ``embedding``, ``depth`` blocks and ``heads``.

    ``heads``: value of ``loss_heads``; or "whole" (no head is split over tp) or "first" (only the
        first is). Otherwise
    head i has shift i and weight 1 / (1 + i).
    """
    model = nn.Sequential()
    model.add_module("embedding", nn.Embedding(vocab_size, width))
    for i in range(depth):
        model.add_module(f"block{i}", Mixing(width))
    model.add_module("heads", Heads(vocab_size, width, count))
    model.sharding_plan = {
        "embedding": "vocab",
        "block*.up": "column",
        "block*.down": "row",
        "heads.out.*": "vocab",
    }
    if heads in ("whole", "first"):
        del model.sharding_plan["heads.out.*"]
    if heads == "first":
        model.sharding_plan["heads.out.0"] = "vocab"
    declared = isinstance(heads, list | int)
    model.loss_heads = heads if declared else [(shift, 1.0 / (1 + shift)) for shift in range(count)]
    return model


def with_own_loss() -> nn.Sequential:
    """Build a model that declares both ``loss`` and ``loss_heads``, which contradict each other."""
    model = build()
    model.loss = lambda output, labels: output[0].logsumexp(-1)
    return model
