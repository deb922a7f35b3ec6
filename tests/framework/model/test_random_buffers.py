"""Constant buffers that a builder draws at random: the same in every process, and under verify."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.model.build import build_model
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of

BUILDER = "tests.framework.model.test_random_buffers:build"
OPTIONS = {"vocab_size": 17, "width": 8}


class Features(nn.Module):
    """Fixed random projections, of all three generators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("of_torch", torch.randn(width, width))
        self.register_buffer("of_numpy", torch.tensor(np.random.rand(width)), persistent=False)
        self.register_buffer("of_python", torch.tensor([random.random() for _ in range(width)]))
        self.register_buffer("constant", torch.arange(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(
            self.inner(x) @ self.of_torch.to(x) + self.of_numpy.to(x)
        ) * self.of_python.to(x)  # type: ignore[operator]


def build(vocab_size: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(vocab_size, width),
        Features(width),
        Features(width),
        nn.Linear(width, vocab_size),
    )


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Check that the block leaves the states of all generators as they were."""
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[union-attr]
    yield
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[2]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[union-attr]


def buffers(seed: int) -> dict[str, Tensor]:
    with unchanged_generators():
        return dict(build_model(BUILDER, OPTIONS, seed).layers.named_buffers())


def test_each_process_draws_the_same() -> None:
    first = buffers(1)
    torch.randn(3), np.random.rand(3), random.random()
    again, other = buffers(1), buffers(2)
    assert len(first) == 8 and all(
        torch.equal(buffer, again[name]) for name, buffer in first.items()
    )
    equal = {name for name, buffer in first.items() if torch.equal(buffer, other[name])}
    assert equal == {"1.constant", "2.constant"}


@pytest.mark.parametrize("layout", ["dp2", "pp2", "dp2,pp2,zero3,full"])
def test_layouts_give_the_numbers_of_one_process(layout: str, pool: RankPool) -> None:
    config = config_of(BUILDER, OPTIONS, sequence_length=6)
    assert_agrees(config, layout, pool, References(), global_batch=4, steps=2)
