"""Models whose layers lean on something besides their input and their own tensors;
plain torch trains all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, V = 8, 24


class Block(nn.Module):
    """x + tanh(linear(x))"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Noting(Block):
    """Puts what it is handed into a place outside of it."""

    def __init__(self, place: dict[str, Tensor]) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        self.place["x"] = 2.0 * x
        return super().forward(x)


class Taking(Noting):
    """Adds what lies there."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.place["x"]


class OtherHead(nn.Module):
    """Logits by a weight that another layer holds."""

    def __init__(self, weight: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight_of = weight
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight_of())


class Writing(Block):
    """Changes its weight before it uses it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        with torch.no_grad():
            if self.how == "clamp":
                weight.clamp_(-0.2, 0.2)
            elif self.how == "row":
                weight[0].mul_(0.5)
            elif self.how == "data":
                weight.data = weight.data / weight.data.norm()
            elif self.how == "data in place":
                weight.data.div_(2.0)
            elif self.how == "average":
                weight.lerp_(self.linear.bias.expand_as(weight), 0.1)
        return super().forward(x)


class Drawing(Block):
    """Noise of one kind or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.sources: list[Any] = [np.random.default_rng(0), np.random.RandomState(0)]
        self.python = random.Random(0)
        self.torch = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.how == "torch":
            return x + 0.01 * torch.randn_like(x)
        if self.how == "torch, own":
            return x + 0.01 * torch.randn(
                x.shape, generator=self.torch if x.is_cpu else None, device=x.device
            )
        if self.how == "slopes":
            return F.rrelu(x, training=self.training)
        numbers = {
            "numpy": np.random.rand,
            "python": random.random,
            "python, own": self.python.random,
            "numpy, own": self.sources[0].random,
            "numpy, own, old": self.sources[1].rand,
        }
        return x * (1.0 + 0.1 * numbers[self.how]())


class Remembering(Block):
    """Keeps something from one forward to the next."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.count = torch.zeros(())
        self.before: Tensor | None = None
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.how == "count":
            self.calls += 1
            return y / self.calls
        if self.how == "count in a tensor":
            self.calls += 1
            return y * torch.tensor(float(self.calls))
        if self.how == "tensor that counts":
            self.count += 1
            return y * self.count
        if self.how == "previous":
            y = y if self.before is None else y + self.before
            self.before = x.detach()
            return y
        if self.how == "generator of the module":
            return y * float(GENERATOR.normal())
        if self.how == "caught":
            try:
                return y + torch.rand_like(y)
            except Exception:
                return y
        key = (x.shape[1], str(x.device))
        if key not in CONSTANTS:
            CONSTANTS[key] = torch.arange(x.shape[1], device=x.device).cos().unsqueeze(-1)
        if self.mask is None or self.mask.device != x.device:
            self.mask = torch.ones_like(x[:, :, :1])
        return y + CONSTANTS[key] * self.mask


GENERATOR = np.random.default_rng(1)
CONSTANTS: dict[Any, Tensor] = {}
"""Made when first needed, and kept for all layers."""


class Attention(nn.Module):
    """The attention kernel with a dropout of zero, which is tagged as random."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return x + F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.p
        ).squeeze(1)


def build(kind: str = "plain", how: str = "") -> nn.Sequential:
    embedding = nn.Embedding(V, D, max_norm=0.5 if kind == "renormed" else None)
    place: dict[str, Tensor] = {}
    first: dict[str, Callable[[], nn.Module]] = {
        "talking": lambda: Noting(place),
        "writing": lambda: Writing(how),
        "drawing": lambda: Drawing(how),
        "attention": lambda: Attention(float(how)),
        "remembering": lambda: Remembering(how),
        "slopes": lambda: nn.RReLU(),
        "recurrent": lambda: nn.Sequential(nn.GRU(D, D, batch_first=True), First()),
    }
    second = (
        Taking(place)
        if kind == "talking"
        else Remembering("")
        if kind == "remembering"
        else Block()
    )
    own = nn.Linear(D, V)
    unregistered = [own]
    heads: dict[str, Callable[[], nn.Module]] = {
        "closure": lambda: OtherHead(lambda: embedding.weight),
        "own closure": lambda: Reaching(),
        "list": lambda: OtherHead(lambda: unregistered[0].weight),
    }
    head = heads[kind]() if kind in heads else nn.Linear(D, V)
    return nn.Sequential(embedding, first.get(kind, Block)(), Block(), second, head)


class First(nn.Module):
    """The first of what a recurrent layer returns."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0]


class Reaching(nn.Module):
    """Uses its own weight by a function that remembers the module it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, V)
        linear = self.linear
        self.run = lambda x: F.linear(x, linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)  # type: ignore[no-any-return]
