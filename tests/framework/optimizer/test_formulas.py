"""Element-wise optimizers of our own on flat shards, cut anywhere,
against their formulas on whole tensors.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import meshwright.optimizer.factored
from meshwright.build import build
from meshwright.config import Optimizer
from meshwright.config.combinations.layout import parse_layout
from meshwright.mesh.comm import Group
from meshwright.mesh.grid import Grid
from meshwright.mesh.holders import Holders
from meshwright.mesh.mesh import open_mesh
from meshwright.optimizer import ShardLayout, ShardPlace, evaluating, factors_of, read_states
from meshwright.optimizer.codecs import StateCodec
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.schedule_free import average_weight
from meshwright.parameters import ParameterInfo
from meshwright.step import take_step
from meshwright.verify.layouts import layout_config
from meshwright.verify.plain_formulas import PlainLion, PlainScheduleFree
from meshwright.verify.rank import open_verify_source
from tests.end_to_end.driving import GPT2
from tests.framework.verify.cases import config_of

CONFIG = Optimizer(name="lion", learning_rate=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shard(weights: Tensor, gradient: Tensor) -> OptimizerShard:
    return OptimizerShard(weights, gradient, True, False, lambda: gradient, lambda: None)


def flat_optimizer(weights: Tensor, gradient: Tensor, config: Optimizer, cut: int) -> FlatOptimizer:
    """Return two shards of one tensor."""
    parts = zip(
        weights.split([cut, len(weights) - cut]),
        gradient.split([cut, len(weights) - cut]),
        strict=True,
    )
    return FlatOptimizer([shard(*part) for part in parts], config)


@pytest.mark.parametrize("cut", [0, 5, 24])
def test_lion_is_its_formula(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps at changing rates, in pieces of 7 elements;
    some gradients are smaller than eps.
    """
    monkeypatch.setitem(StateCodec.together, "cpu", 7)  # type: ignore[arg-type]
    weights, gradient = drawn(24, seed=0), torch.zeros(24, dtype=torch.float64)
    whole = nn.Parameter(weights.clone())
    ours = flat_optimizer(weights, gradient, CONFIG, cut)
    theirs = PlainLion([{"params": [whole], "weight_decay": 0.3}], CONFIG)
    for step in range(4):
        whole.grad = drawn(24, seed=step + 1) * torch.logspace(-9, 0, 24, dtype=torch.float64)
        gradient.copy_(whole.grad)
        theirs.param_groups[0]["lr"] = rate = 1e-2 / (step + 1)
        theirs.step()
        ours.step(rate, 1.0)
    torch.testing.assert_close(weights, whole.detach(), rtol=1e-13, atol=1e-14)


SHAPES = ((5, 7), (6,), (3, 4, 5), (4, 1, 3), ())


@pytest.mark.parametrize("together", [2**18, 10])
def test_adafactor_is_torch_s_on_whole_parameters(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix, vectors, and weights of three dims in one shard; in pieces of one or two rows."""
    monkeypatch.setitem(meshwright.optimizer.factored.TOGETHER, "cpu", together)
    config = Optimizer(name="adafactor", weight_decay=0.1, beta2_decay=-0.7, clip_threshold=1.5)
    theirs = [nn.Parameter(drawn(*shape, seed=index)) for index, shape in enumerate(SHAPES)]
    reference = torch.optim.Adafactor(
        theirs, beta2_decay=-0.7, eps=(config.eps, 1e-3), d=1.5, weight_decay=0.1
    )
    starts = [0, *itertools.accumulate(math.prod(shape) for shape in SHAPES)]
    weights = torch.cat([each.detach().flatten() for each in theirs])
    slots = tuple((ParameterInfo(str(i), shape), starts[i]) for i, shape in enumerate(SHAPES))
    gradient = torch.zeros_like(weights)
    layout = ShardLayout(ShardPlace(slots, 0, 0), holders=Holders(parts=Group("alone", (0,), 0)))
    of = shard(weights, gradient)._replace(layout=layout)
    ours = FlatOptimizer([of], config)
    for step in range(4):
        for index, each in enumerate(theirs):
            each.grad = drawn(*each.shape, seed=10 * step + index) * 10.0 ** (-2 * index)
        gradient.copy_(torch.cat([each.grad.flatten() for each in theirs if each.grad is not None]))
        reference.param_groups[0]["lr"] = rate = 0.3 / (step + 1)
        reference.step()
        ours.step(rate, 1.0)
    found = torch.cat([each.detach().flatten() for each in theirs])
    torch.testing.assert_close(weights, found, rtol=1e-12, atol=1e-14)
    for name, info, tensor in factors_of(ours, 0):
        state = reference.state[theirs[int(info.name)]][{"exp_avg_sq": "variance"}.get(name, name)]
        torch.testing.assert_close(tensor.flatten(), state.flatten(), rtol=1e-12, atol=0.0)


FREE = Optimizer(
    name="schedule_free_adamw",
    schedule="constant",
    learning_rate=1e-2,
    weight_decay=0.3,
    warmup_steps=3,
)


@pytest.mark.parametrize("cut", [0, 5])
def test_schedule_free_is_its_authors_formula(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """y after each of five steps, x within the context, and y again to the bit."""
    monkeypatch.setitem(StateCodec.together, "cpu", 7)  # type: ignore[arg-type]
    weights, gradient = drawn(24, seed=0), torch.zeros(24, dtype=torch.float64)
    whole = nn.Parameter(weights.clone())
    ours = flat_optimizer(weights, gradient, FREE, cut)
    theirs = PlainScheduleFree([{"params": [whole], "weight_decay": 0.3}], FREE)
    for step in range(5):
        whole.grad = drawn(24, seed=step + 1)
        gradient.copy_(whole.grad)
        theirs.param_groups[0]["lr"] = rate = 1e-2 * min(1, (step + 1) / 3)
        theirs.step()
        ours.step(rate, 1.0)
        torch.testing.assert_close(weights, whole.detach(), rtol=1e-13, atol=1e-14)
        kept = weights.clone()
        with evaluating(ours):
            torch.testing.assert_close(weights, theirs.averages[whole], rtol=1e-12, atol=1e-13)
            assert not torch.allclose(weights, kept, rtol=1e-4) or step == 0
        assert torch.equal(weights, kept)
        assert torch.equal(read_states(ours, 0)[0]["y"], weights[:cut])


@pytest.mark.parametrize(
    ("name", "counts_skipped"), [("schedule_free_adamw", False), ("adamw", True)]
)
def test_the_rate_after_skipped_steps(name: str, counts_skipped: bool) -> None:
    """The average of schedule-free AdamW weighs a step by its rate:
    both count the steps that were taken.
    """
    config = config_of("meshwright_models.gpt2:build", GPT2, 8).replace(
        optimizer={"name": name, "schedule": "constant", "learning_rate": 1e-2, "warmup_steps": 10}
    )
    config = layout_config(config, parse_layout(""), 4, "float64")
    parts = build(config, open_mesh(Grid(), "cpu"), (open_verify_source(config, True), {}))
    assert take_step(parts).learning_rate == pytest.approx(1e-3)
    parts.state.step += 3  # as after three skipped ones
    stats = take_step(parts)
    assert stats.learning_rate == pytest.approx(5e-3 if counts_skipped else 2e-3)
    assert (parts.state.step, parts.state.optimizer_steps) == (5, 2)


@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_weights_of_the_average_are_squares_of_learning_rates(warmup_steps: int) -> None:
    """The first iterate is the average; then what a running sum gives."""
    total = 0.0
    for step in range(9):
        rate = min(1.0, (step + 1) / max(warmup_steps, 1))
        total += rate**2
        assert average_weight(step, warmup_steps) == pytest.approx(rate**2 / total, rel=1e-14)
