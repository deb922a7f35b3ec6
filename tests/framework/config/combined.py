"""Small models with the traits that the table of pairs knows, one builder for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright_models import gpt2, llama

VOCAB_SIZE, WIDTH = 16, 8


def small(dropout: float = 0.0) -> nn.Sequential:
    """Build a GPT-2 that every degree up to 2 divides."""
    return gpt2.build(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=2,
        max_sequence_length=8,
        dropout=dropout,
    )


def without_core() -> nn.Sequential:
    """Build it with a plan that does not name the attention core."""
    model = small()
    plan = model.sharding_plan
    assert isinstance(plan, dict)
    model.sharding_plan = {name: kind for name, kind in plan.items() if kind != "context"}
    return model


def _llama(**options: Any) -> nn.Sequential:
    return llama.build(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        ffn_size=16,
        **options,
    )


def several_heads() -> nn.Sequential:
    """Build a Llama with multi-token prediction."""
    return _llama(mtp_layers=1)


def mixture() -> nn.Sequential:
    """Build a Llama with experts."""
    return _llama(moe={"num_experts": 4, "top_k": 2})


class Scaled(nn.Module):
    """Layer with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def with_scalar() -> nn.Sequential:
    """Build a model with such a parameter."""
    return nn.Sequential(nn.Embedding(VOCAB_SIZE, WIDTH), Scaled(), nn.Linear(WIDTH, VOCAB_SIZE))


class Normed(nn.Module):
    """Layer with BatchNorm over all tokens, and linears that the plan splits. (B, S, D) -> same."""

    def __init__(self, kind: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = kind(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, 1)).view(x.shape)
        hidden: Tensor = self.down(self.up(y))
        return hidden


class Count(nn.Module):
    """Part with a buffer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x.tanh()


class Counting(nn.Module):
    """Layer with such a part, and linears that the plan splits. (B, S, D) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.up(self.count(x)))
        return hidden


def _planned(middle: nn.Module) -> nn.Sequential:
    model = nn.Sequential(
        nn.Embedding(VOCAB_SIZE, WIDTH), middle, nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
    )
    model.sharding_plan = {"0": "vocab", "1.up": "column", "1.down": "row", "2": "vocab"}
    return model


def normed() -> nn.Sequential:
    """Build a model with BatchNorm in a layer that the plan splits."""
    return _planned(Normed())


def synchronised() -> nn.Sequential:
    """Build a model with SyncBatchNorm in a layer that the plan splits."""
    return _planned(Normed(nn.SyncBatchNorm))


def synchronised_and_coupled() -> nn.Sequential:
    """Build a model with SyncBatchNorm and BatchNorm."""
    layer = Normed()
    layer.norm = nn.Sequential(nn.SyncBatchNorm(WIDTH), nn.BatchNorm1d(WIDTH))
    return _planned(layer)


def counting() -> nn.Sequential:
    """Build a model with a buffer that counts calls, in a part that "selective" recomputes."""
    model = _planned(Counting())
    model.selective_recompute = ["1.count"]
    return model


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Sixteen samples of eight tokens, without document starts."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = (torch.arange(9) + index) % VOCAB_SIZE
        return ids[:-1], ids[1:]


def tokens(split: str) -> Tokens | None:
    """Return the samples of a split, for ``data.builder``."""
    return Tokens() if split == "train" else None
