"""Models and data of users who err, each in one way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.vision import convnet, images


class Branches(nn.Module):
    """Decides by the numbers."""

    def __init__(self, item: bool) -> None:
        super().__init__()
        self.item = item

    def forward(self, x: Tensor) -> Tensor:
        if self.item:
            return x * x.abs().max().item()
        return x if x.sum() > 0 else -x


class HandsOnANumber(nn.Module):
    """Not only tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, 3


class TakesANumber(nn.Module):
    """What the other one gives."""

    def forward(self, value: tuple[Tensor, int]) -> Tensor:
        return value[0] * value[1]


class OwnMean(nn.Module):
    """A mean that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def model(kind: str) -> nn.Sequential:
    """Return a classifier of 16 x 16 images with one fault in the middle."""
    layers: dict[str, list[nn.Module]] = {
        "in_place": [nn.ReLU(inplace=True)],
        "branch": [Branches(item=False)],
        "item": [Branches(item=True)],
        "number": [HandsOnANumber(), TakesANumber()],
        "pattern": [nn.ReLU()],
        "batch_norm": [nn.BatchNorm1d(8)],
        "own_mean": [OwnMean()],
    }
    found = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), *layers[kind], nn.Linear(8, 8))
    if kind == "pattern":
        found.sharding_plan = {"linaer": "column"}
    return found


class Data(images.Gratings):
    """Gratings with one fault."""

    kind = ""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        if self.kind == "raises" and index == 5:
            raise ArithmeticError("no such image")
        if self.kind == "raises first":
            raise ArithmeticError("no such image")
        if self.kind == "ragged" and index == self.length - 1:
            return image[:, :-1], label
        if self.kind == "ragged inside" and index == 5:
            return image[:, :-1], label
        if self.kind == "no pair":
            return image  # type: ignore[return-value]
        if self.kind == "text":
            return image, "a cat"  # type: ignore[return-value]
        if self.kind == "other dtype" and index == 5:
            return image.double(), label
        return image, label


def data(split: str, kind: str) -> Data:
    """16 images."""
    found = Data(0, 16, 16, 8, 0.1)
    found.kind = kind
    return found


def counted(channels: int = 4) -> nn.Sequential:
    """Return the convolutional network, two layers deep."""
    return convnet.build(channels, depth=2)


__all__ = ["counted", "data", "model", "torch"]
