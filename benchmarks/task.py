"""Task that both sides of every comparison train: model, tokens, batch, optimizer, defined once.

A step has 16 sequences of 256 tokens, in micro-batches of 2: one process takes 8 of them, a replica
among two takes 4, a replica among eight takes 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshwright_models.gpt2
from meshwright.config import RunConfig, resolve
from meshwright.model.build import PlainModel, build_model

VOCAB_SIZE = 4096
SEQUENCE_LENGTH = 256
HIDDEN_SIZE = 256
NUM_LAYERS = 4
NUM_HEADS = 8
GLOBAL_BATCH = 16
MICRO_BATCH_SIZE = 2
NUM_SAMPLES = 64
"""Number of distinct samples; steps cycle through them."""
SEED = 1234
CLIP_NORM = 1.0
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
TOKENS_PER_STEP = GLOBAL_BATCH * SEQUENCE_LENGTH
BUILDER = "meshwright_models.gpt2:build"


def model_options(*, tied: bool) -> dict[str, object]:
    """Return options for ``meshwright_models.gpt2.build``."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_layers": NUM_LAYERS,
        "num_heads": NUM_HEADS,
        "max_sequence_length": SEQUENCE_LENGTH,
        "dropout": 0.0,
        "tied": tied,
    }


def run_config(
    dp: int = 1, pp: int = 1, tp: int = 1, *, zero: int = 1, tied: bool = True
) -> RunConfig:
    """Return the resolved configuration of one of this framework's runs."""
    config = RunConfig.model_validate(
        {
            "run": {"seed": SEED},
            "model": {"builder": BUILDER, "options": model_options(tied=tied)},
            "data": {"train": "in memory", "sequence_length": SEQUENCE_LENGTH},
            "batch": {"global_batch": GLOBAL_BATCH, "micro_batch_size": MICRO_BATCH_SIZE},
            "parallel": {"dp": dp, "pp": pp, "tp": tp, "zero": zero},
            "pipeline": {"schedule": "1f1b"},
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "schedule": "constant",
                "betas": BETAS,
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
                "clip_norm": CLIP_NORM,
            },
            "train": {"dtype": "float32", "device": "cpu"},
        }
    )
    return resolve(config, dp * pp * tp)


def sample_table() -> Tensor:
    """Draw the token ids of all samples, (NUM_SAMPLES, SEQUENCE_LENGTH + 1) int64."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCAB_SIZE, (NUM_SAMPLES, SEQUENCE_LENGTH + 1), generator=generator)


class Samples:
    """Samples by their index, the same for both sides.
    A :class:`meshwright.data.sources.Source`.
    """

    def __init__(self) -> None:
        self.table = sample_table()

    def rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), both (count, S), of the samples from ``first`` on."""
        first %= NUM_SAMPLES
        assert first + count <= NUM_SAMPLES, "steps divide the table"
        rows = self.table[first : first + count]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), both (B, S), of consecutive sample indices."""
        return self.rows(indices[0], len(indices))


def initial_model(*, tied: bool) -> PlainModel:
    """Return this framework's model on the meta device:
    the source of the initial weights by name.
    """
    return build_model(BUILDER, model_options(tied=tied), SEED)


def plain_model(*, tied: bool) -> nn.Sequential:
    """Build the model of ``meshwright_models.gpt2`` in plain torch,
    with the initial weights of our runs.
    """
    layers = meshwright_models.gpt2.build(**model_options(tied=tied))  # type: ignore[arg-type]
    weights = initial_model(tied=tied)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(weights.initial(name))
    return layers


def decay_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups for torch.optim: matrices are decayed, vectors are not."""
    both = list(parameters)
    return [
        {"params": [p for p in both if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in both if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    """Return torch's fused AdamW with the hyperparameters of the task."""
    return torch.optim.AdamW(
        decay_groups(parameters), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True
    )
