"""Every built-in optimizer with every format of its states, on cut shards: the numbers of its plain
twin on whole parameters, the bytes of its spec, and states that go out and come back.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.config.optimizers import OPTIMIZERS
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders
from meshwright.optimizer import (
    ShardLayout,
    ShardPlace,
    evaluated_weights,
    evaluating,
    read_states,
    restore_states,
    saved_states_of,
    states_of,
)
from meshwright.optimizer.at_rest import state_bytes
from meshwright.optimizer.choice import BUILDERS
from meshwright.optimizer.eight_bit import QuantisedState
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.schedule_free import GRADIENT_POINT
from meshwright.parameters import ParameterInfo
from meshwright.verify.plain_optimizer import TWINS, plain_optimizer

SEED, RATE, BLOCK = 11, 1e-2, 8
INFO = ParameterInfo("w", (6, 16))
NUMEL = 96
FORMATS = [
    (name, state_format)
    for name, spec in OPTIMIZERS.items()
    for state_format in ("float32", *spec.formats)
    if spec.unit == "element"
]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def keys_of(name: str, state_format: str) -> Optimizer:
    schedule = "constant" if OPTIMIZERS[name].averages_weights else "cosine"
    return Optimizer(
        name=name,
        state_dtype=state_format,  # type: ignore[arg-type]
        block_size=BLOCK,
        learning_rate=RATE,
        weight_decay=0.3,
        schedule=schedule,
    )


def flat_optimizer(
    keys: Optimizer, weights: Tensor, gradient: Tensor, cuts: list[int]
) -> FlatOptimizer:
    """Return the optimizer of shards that end at ``cuts``."""
    shards = []
    for start, stop in zip([0, *cuts], [*cuts, NUMEL], strict=True):
        own, grad = weights[start:stop], gradient[start:stop]
        holders = Holders(parts=Group("alone", (0,), 0))
        layout = ShardLayout(ShardPlace(((INFO, 0),), start, SEED), holders=holders)
        shard = OptimizerShard(
            own,
            grad,
            decays=True,
            is_eight_bit=keys.has_blocks,
            fetch_gradient=lambda grad=grad: grad,  # type: ignore[misc]
            after_step=lambda: None,
            layout=layout,
        )
        shards.append(shard)
    return FlatOptimizer(shards, keys)


def gradient_of(step: int) -> Tensor:
    """Return a gradient whose elements have many magnitudes."""
    return drawn(6, 16, seed=step + 1) * torch.logspace(-6, 0, NUMEL, dtype=torch.float64).view(
        6, 16
    )


def test_every_name_has_a_spec_a_builder_and_a_twin() -> None:
    assert OPTIMIZERS.keys() == BUILDERS.keys() == TWINS.keys()


@pytest.mark.parametrize(("name", "state_format"), FORMATS)
def test_cut_shards_have_the_numbers_of_whole_parameters(name: str, state_format: str) -> None:
    """Five steps at changing rates, one shard cut into three between blocks;
    evaluation's weights too.
    """
    keys = keys_of(name, state_format)
    weights, gradient = drawn(NUMEL, seed=0), torch.zeros(NUMEL, dtype=torch.float64)
    whole = nn.Parameter(weights.clone().view(6, 16))
    ours = flat_optimizer(keys, weights, gradient, [BLOCK, 5 * BLOCK])
    plain = plain_optimizer({"w": whole}, keys, {}, {}, torch.float64, SEED)
    for step in range(5):
        whole.grad = gradient_of(step)
        gradient.copy_(whole.grad.flatten())
        # an average weighs steps by their rate, and has a rate of its own for each
        rate = RATE if keys.spec.averages_weights else RATE / (step + 1)
        plain.param_groups[0]["lr"] = rate
        plain.step()
        ours.step(rate, 1.0)
        torch.testing.assert_close(weights, whole.detach().flatten(), rtol=1e-12, atol=1e-14)
    averaged = torch.cat([evaluated_weights(ours, index) for index in range(3)])
    with evaluating(ours):
        assert torch.equal(weights, averaged)
    assert torch.equal(averaged, weights) is not keys.spec.averages_weights


@pytest.mark.parametrize(("name", "state_format"), FORMATS)
def test_states_go_out_and_come_back_to_the_bit(name: str, state_format: str) -> None:
    """After three steps, into an optimizer whose states are in memory of its own; the same two
    steps follow.
    """
    keys = keys_of(name, state_format)
    weights, gradient = drawn(NUMEL, seed=0), torch.zeros(NUMEL, dtype=torch.float64)
    first = flat_optimizer(keys, weights, gradient, [])
    for step in range(3):
        gradient.copy_(gradient_of(step).flatten())
        first.step(RATE, 1.0)
    states, steps = read_states(first, 0)
    assert tuple(states) == saved_states_of(keys) and steps == 3
    assert all(state.dtype == torch.float64 and state.any() for state in states.values())
    copy = weights.clone()
    other_gradient = torch.zeros_like(gradient)
    second = flat_optimizer(keys, copy, other_gradient, [])
    kept = {key: state.clone() for key, state in states.items() if key != GRADIENT_POINT}
    restore_states(second, 0, kept, steps)
    for step in range(3, 5):
        for optimizer, found in ((first, gradient), (second, other_gradient)):
            found.copy_(gradient_of(step).flatten())
            optimizer.step(RATE, 1.0)
    assert torch.equal(weights, copy)
    for key, state in read_states(first, 0)[0].items():
        assert torch.equal(state, read_states(second, 0)[0][key]), key


def bytes_of(stored: object) -> int:
    tensors = stored if isinstance(stored, QuantisedState) else (stored,)
    return sum(
        each.numel() * each.element_size()
        for each in tensors
        if isinstance(each, Tensor) and each.dim()
    )


@pytest.mark.parametrize(("name", "state_format"), FORMATS)
def test_bytes_in_memory_are_those_of_the_spec(name: str, state_format: str) -> None:
    keys = keys_of(name, state_format)
    weights, gradient = drawn(NUMEL, seed=0).float(), torch.ones(NUMEL)
    optimizer = flat_optimizer(keys, weights, gradient, [])
    optimizer.step(RATE, 1.0)
    held = sum(map(bytes_of, optimizer.inner.state[optimizer.parameters[0]].values()))
    assert held == NUMEL * state_bytes(keys, 4, is_eight_bit=keys.has_blocks)
    full = 4 * len(states_of(keys))
    assert (held < NUMEL * full) is (keys.state_format != "float32")
