"""A small vision transformer: images (B, 1, size, size) in, logits (B, classes) out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Patches(nn.Module):
    """Squares of the image, each mapped to a vector, and a learned position: (B, 1, H, W) -> (B, N,
    width).
    """

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, patch, stride=patch)
        self.position = nn.Parameter(torch.empty((size // patch) ** 2, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + self.position


class Attention(nn.Module):
    """Every patch looks at every other one.
    The number of heads is read off what the linears give.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        # softmax would not see a bias: its gradient is rounding
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linears, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Head(nn.Module):
    """The mean over the patches decides."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.norm(x).mean(dim=1))


def build(
    size: int = 16,
    patch: int = 4,
    width: int = 32,
    depth: int = 4,
    heads: int = 4,
    classes: int = 8,
    dropout: float = 0.0,
    sharded: bool = False,
) -> nn.Sequential:
    """``patches``, ``block0`` .., ``head``."""
    model = nn.Sequential()
    model.add_module("patches", Patches(size, patch, width))
    for index in range(depth):
        model.add_module(f"block{index}", Block(width, heads, dropout))
    model.add_module("head", Head(width, classes))
    if sharded:  # tensor parallelism
        model.sharding_plan = {
            "block*.attention.[qkv]*": "column",  # query, key, value
            "block*.attention.out": "row",
            "block*.up": "column",
            "block*.down": "row",
        }
        model.divisible = {"block*.attention": heads}  # a head stays whole
    return model
