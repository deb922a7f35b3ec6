"""A dataset and models for runs that are watched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import meshwright_models.gpt2

VOCAB_SIZE = 61


class Tokens:
    """256 samples of 8 tokens each, by index."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB_SIZE, (9,), generator=draw)
        return tokens[:-1], tokens[1:]


def tokens(split: str) -> Tokens | None:
    """For training only."""
    return Tokens() if split == "train" else None


class Normed(nn.Module):
    """BatchNorm over the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.transpose(1, 2))
        return normed.transpose(1, 2)


def with_running_buffers(vocab_size: int = VOCAB_SIZE, width: int = 8) -> nn.Sequential:
    """Statistics that forward changes."""
    return nn.Sequential(
        nn.Embedding(vocab_size, width),
        nn.Linear(width, width),
        Normed(width),
        nn.Linear(width, width),
        nn.Linear(width, vocab_size),
    )


def double(x: Tensor) -> Tensor:
    """Return the function that a test compiles."""
    return x * 2


class Doubling(nn.Module):
    """Layer that calls a function, which may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.double: Callable[[Tensor], Tensor] = double

    def forward(self, x: Tensor) -> Tensor:
        return self.double(x)


def with_a_compiled_function(vocab_size: int = VOCAB_SIZE, width: int = 8) -> nn.Sequential:
    """Layers, one of which calls a function."""
    return nn.Sequential(
        nn.Embedding(vocab_size, width),
        nn.Linear(width, width),
        Doubling(),
        nn.Linear(width, vocab_size),
    )


def partly_frozen(vocab_size: int = VOCAB_SIZE) -> nn.Sequential:
    """GPT-2 whose first block is not trained."""
    model = meshwright_models.gpt2.build(
        vocab_size=vocab_size,
        hidden_size=16,
        num_layers=3,
        num_heads=2,
        max_sequence_length=8,
        dropout=0.1,
    )
    for name, parameter in model.named_parameters():
        if name.startswith("block0"):
            parameter.requires_grad_(False)
    return model
