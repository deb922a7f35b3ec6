"""A model with step sums, in plain torch:
the choice among a few scales is balanced over the global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Balanced(nn.Module):
    """Multiplies each token by one of ``num_scales`` learned vectors, chosen by score + bias."""

    step_sums = ("counts",)

    def __init__(self, width: int, num_scales: int, rate: float = 0.01) -> None:
        super().__init__()
        self.rate = rate
        self.scores = nn.Linear(width, num_scales, bias=False)
        self.scales = nn.Embedding(num_scales, width)
        self.register_buffer("bias", torch.zeros(num_scales, device="cpu"))
        self.register_buffer("counts", torch.zeros(num_scales, dtype=torch.int64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x).sigmoid()
        chosen = (scores.detach() + self.bias).argmax(-1)
        if self.training:
            with torch.no_grad():
                ones = torch.ones_like(chosen.reshape(-1))
                self.counts += torch.zeros_like(self.counts).scatter_add_(
                    0, chosen.reshape(-1), ones
                )
        return x + self.scales(chosen) * scores.gather(-1, chosen.unsqueeze(-1))

    def end_step(self) -> None:
        """Raise the bias of scales with fewer tokens than the mean, and lower the others'."""
        counts = self.counts.double()
        self.bias += (self.rate * (counts.mean() - counts).sign()).to(self.bias.dtype)
        self.counts.zero_()


class LastStepNorm(nn.Module):
    """Normalisation by the statistics of all tokens of the last step: no sample sees another."""

    step_sums = ("count", "total", "squares")

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("mean", torch.zeros(width, device="cpu"))
        self.register_buffer("variance", torch.ones(width, device="cpu"))
        for name, size in (("count", 1), ("total", width), ("squares", width)):
            sums = torch.zeros(size, dtype=torch.float64, device="cpu")
            self.register_buffer(name, sums, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            rows = x.detach().flatten(0, -2).double()
            self.count += len(rows)
            self.total += rows.sum(0)
            self.squares += rows.square().sum(0)
        return (x - self.mean) * (self.variance + self.eps).rsqrt()

    def end_step(self) -> None:
        mean = self.total / self.count
        self.mean.copy_(mean)
        self.variance.copy_(self.squares / self.count - mean.square())
        for name in self.step_sums:
            self.get_buffer(name).zero_()


def build_last_step_norm(vocab_size: int = 33, width: int = 8) -> nn.Sequential:
    """Build a model with two such norms, one between linears that a plan splits."""
    model = nn.Sequential()
    model.add_module("tokens", nn.Embedding(vocab_size, width))
    for index in range(2):
        model.add_module(f"norm{index}", LastStepNorm(width))
        model.add_module(f"up{index}", nn.Linear(width, 4 * width))
        model.add_module(f"activation{index}", nn.Tanh())
        model.add_module(f"down{index}", nn.Linear(4 * width, width))
    model.add_module("head", nn.Linear(width, vocab_size))
    model.sharding_plan = {"tokens": "vocab", "up*": "column", "down*": "row", "head": "vocab"}
    return model


def build(vocab_size: int = 33, width: int = 8, num_scales: int = 4) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("tokens", nn.Embedding(vocab_size, width))
    model.add_module("balanced0", Balanced(width, num_scales))
    model.add_module("up", nn.Linear(width, 4 * width))
    model.add_module("activation", nn.GELU())
    model.add_module("down", nn.Linear(4 * width, width))
    model.add_module("balanced1", Balanced(width, num_scales))
    model.add_module("head", nn.Linear(width, vocab_size))
    model.sharding_plan = {"tokens": "vocab", "up": "column", "down": "row", "head": "vocab"}
    return model
