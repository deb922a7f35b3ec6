"""A small convolutional network whose layers keep running statistics: images (B, 1, H, W)
to logits (B, classes).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Convolution(nn.Module):
    """Convolution, BatchNorm, ReLU; ``stride=2`` halves the image."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolve(x)))


class Head(nn.Module):
    """The mean over the image decides."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(x.mean(dim=(2, 3)))


def build(
    channels: int = 16, depth: int = 6, classes: int = 8, synchronised: bool = False
) -> nn.Sequential:
    """``layer0`` .., ``head``: every second layer halves the image and doubles the channels,
    twice. ``synchronised``: normalise by the statistics of all replicas (nn.SyncBatchNorm).
    """
    model = nn.Sequential()
    now = 1
    for index in range(depth):
        after = channels * 2 ** min(index // 2, 2)
        model.add_module(
            f"layer{index}", Convolution(now, after, stride=2 if index in (2, 4) else 1)
        )
        now = after
    model.add_module("head", Head(now, classes))
    if synchronised:
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model
