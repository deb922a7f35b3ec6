"""Models that are hard on whoever shards their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Sometimes(nn.Module):
    """``spare`` has a gradient only when the data say so, ``never`` has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.linear(x))
        return y + self.spare(x) if x.is_meta or float(x.detach().double().sum()) > 0 else y


class InPlace(nn.Module):
    """Writes into what it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.linear(x.clone()))
        return x


class PartlyFrozen(nn.Module):
    """Half of a layer is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.requires_grad_(False)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.other(self.linear(x)))


class Scale(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Strided(nn.Module):
    """A weight whose rows are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).t())

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Empty(nn.Module):
    """A weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, WIDTH))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum(0)


class Uncalled(nn.Module):
    """Takes the weight of a module for itself; all of the kind share one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.linear.weight))


KINDS = {
    each.__name__: each
    for each in (Sometimes, InPlace, PartlyFrozen, Scale, Strided, Empty, Uncalled)
}


def of_kind(kind: str, vocab_size: int = 17, depth: int = 2) -> nn.Sequential:
    """Some layers of one kind."""
    layers = [KINDS[kind]() for _ in range(depth)]
    model = nn.Sequential(nn.Embedding(vocab_size, WIDTH), *layers, nn.Linear(WIDTH, vocab_size))
    if kind == "Uncalled":
        model.tied_weights = [
            ("1.linear.weight", f"{number}.linear.weight") for number in range(2, depth + 1)
        ]
        for layer in layers:
            layer.linear.weight = layers[0].linear.weight
    return model
