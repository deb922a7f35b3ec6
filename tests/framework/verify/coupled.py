"""Models in which samples see each other, or that remember; plain torch trains all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

D, V = 8, 24


class Block(nn.Module):
    """x + tanh(linear(x)), and something besides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(D, D)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.linear(x))
        if self.how == "mean":
            return y - x.mean(0, keepdim=True)
        if self.how == "largest":
            return y / x.detach().abs().max()
        if self.how == "capacity":  # the better half of all tokens of the micro-batch
            tokens = y.flatten(0, 1)
            chosen = tokens.sum(-1).topk(len(tokens) // 2).indices
            return torch.zeros_like(tokens).index_add(0, chosen, tokens[chosen]).view_as(x)
        if self.how == "counting":
            self.calls += 1
            return y * (1.0 + 0.01 * self.calls)
        return y


def build(how: str = "", dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(V, D), Block(""), nn.Dropout(dropout), Block(how), nn.Linear(D, V)
    )
