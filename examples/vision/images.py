"""Synthetic images: a noisy grating each, and the class is its orientation. Nothing to download."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Gratings(Dataset[tuple[Tensor, int]]):
    """Sample i is the same in every process: image (1, size, size) float32, label 0 ..
    classes - 1.
    """

    def __init__(self, first: int, length: int, size: int, classes: int, noise: float) -> None:
        self.first, self.length, self.size, self.classes, self.noise = (
            first,
            length,
            size,
            classes,
            noise,
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + index)
        label = int(torch.randint(self.classes, (), generator=draw))
        phase, frequency = torch.rand(2, generator=draw).tolist()
        along = torch.linspace(-1.0, 1.0, self.size)
        y, x = torch.meshgrid(along, along, indexing="ij")
        angle = math.pi * label / self.classes
        wave = 2 * math.pi * (1.5 + frequency) * (x * math.cos(angle) + y * math.sin(angle))
        image = torch.sin(wave + 2 * math.pi * phase)
        return (image + self.noise * torch.randn(image.shape, generator=draw))[None], label


def build(split: str, size: int = 16, classes: int = 8, noise: float = 0.7) -> Gratings:
    """8192 images to train on and 512 others to validate on."""
    return (
        Gratings(0, 8192, size, classes, noise)
        if split == "train"
        else Gratings(10**6, 512, size, classes, noise)
    )
