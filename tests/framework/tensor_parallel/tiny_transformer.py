"""A small transformer of plain modules with everything that a sharding plan can speak of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEAD_DIM, HIDDEN, VOCAB, LENGTH = 16, 4, 24, 9, 8

PLAN = {
    "embedding.tokens": "vocab",
    "embedding.positions": "sequence",
    "block*.attention.[qkv]": "column",
    "block*.attention.q_norm": "heads",
    "block*.attention.drop_scores": "heads",
    "block*.attention.out": "row",
    "block*.up": "column",
    "block*.down": "row",
    "head": "vocab",
}
DIVISIBLE = {"block*.attention.[qkv]": DIM // HEAD_DIM}
TIED = [("embedding.tokens.weight", "head.weight")]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(
            self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        # softmax cancels a bias: its gradient would be rounding errors
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.q_norm = nn.LayerNorm(HEAD_DIM)
        self.drop_scores = nn.Dropout(0.2)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.view(*y.shape[:2], -1, HEAD_DIM).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        scores = (self.q_norm(q) @ k.transpose(-1, -2)).softmax(-1)  # (B, H/tp, S, S)
        y = self.drop_scores(scores) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


def build() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("embedding", Embedding())
    model.add_module("block0", Block())
    model.add_module("block1", Block())
    model.add_module("norm", nn.LayerNorm(DIM))
    model.add_module("head", nn.Linear(DIM, VOCAB, bias=False))
    model.head.weight = model.embedding.tokens.weight  # type: ignore[union-attr, assignment]
    return model
