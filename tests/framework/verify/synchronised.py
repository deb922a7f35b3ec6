"""Models with ``nn.SyncBatchNorm``; plain torch trains all of them in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright_models import llama

D, V = 8, 24


class Normed(nn.Module):
    """Residual layer whose features are normalised over samples and tokens, (B, S, D) -> same."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x).flatten(0, 1)).view_as(x))


class First(nn.Module):
    """Embedding of samples with document starts, {"tokens": (B, S), ...} -> (B, S, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, D)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.tokens(x["tokens"])


class OverRows(nn.Module):
    """Factor per feature by the norm of a sample's mean, one value in a sample. (B, S, D) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm(x.mean(1)).unsqueeze(1)


class OverTokens(nn.Module):
    """Residual norm of three dims, (B, D, S), as after a convolution. (B, S, D) -> same."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x.movedim(1, 2)).movedim(1, 2)


def build(
    dropout: float = 0.1, depth: int = 4, vocab_size: int = V, **options: Any
) -> nn.Sequential:
    """Build a model of both layers. ``options``: of the norms, such as ``momentum``."""
    model = nn.Sequential(nn.Embedding(vocab_size, D))
    for index in range(depth):
        layer = (Normed, OverTokens)[index % 2](nn.SyncBatchNorm(D, **options))
        model.append(layer)
        if index == 1:
            model.append(nn.Dropout(dropout))
    return model.append(nn.Linear(D, vocab_size))


def build_mixed() -> nn.Sequential:
    """Build a model with both kinds of norms."""
    model = build(depth=2)
    model[2].norm = nn.BatchNorm1d(D)
    return model


def build_of_rows() -> nn.Sequential:
    """Build a model that normalises one value of each sample."""
    return nn.Sequential(nn.Embedding(V, D), OverRows(), nn.Linear(D, V))


def build_of_documents() -> nn.Sequential:
    """Build a model that takes samples with document starts."""
    model = build(depth=2)
    model[0] = First()
    return model


def build_llama(**options: Any) -> nn.Sequential:
    """Build a Llama with a layer of normalised features between its blocks."""
    heads = {"num_heads": 2, "num_kv_heads": 2}
    of_llama = llama.build(
        vocab_size=V, hidden_size=D, num_layers=2, ffn_size=16, **heads, **options
    )
    model = nn.Sequential()
    for name, layer in of_llama.named_children():
        model.add_module(name, layer)
        if name == "block0":
            model.add_module("normed", OverTokens(nn.SyncBatchNorm(D)))
    model.sharding_plan = of_llama.sharding_plan
    return model
