"""AdamW and SGD on flat shards against torch's own on the parameters,
and clipping against torch's clip_grad_norm_.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders
from meshwright.optimizer import ShardLayout, read_states, restore_states, states_of
from meshwright.optimizer.adamw import FlatAdamW
from meshwright.optimizer.codecs import NUMBERS
from meshwright.optimizer.eight_bit import BlockCodec
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard, clip_factor
from meshwright.optimizer.sgd import FlatSGD

CONFIG = Optimizer(learning_rate=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shard(
    weights: Tensor, gradient: Tensor, decays: bool, counted: bool, *, is_eight_bit: bool = False
) -> OptimizerShard:
    return OptimizerShard(
        weights,
        gradient,
        decays,
        is_eight_bit,
        fetch_gradient=lambda: gradient,
        after_step=lambda: None,
        layout=ShardLayout(holders=Holders(copies_group=Group("dp", (0, 1), 0 if counted else 1))),
    )


def flat(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("factor", [1.0, 0.125])
def test_it_is_torch_s_adamw_with_decay_on_matrices_alone(factor: float) -> None:
    """Five steps at changing rates; matrices in one shard, vectors in another,
    an odd cut through the matrices.
    """
    matrices = [nn.Parameter(drawn(3, 4, seed=0)), nn.Parameter(drawn(5, 2, seed=1))]
    vectors = [nn.Parameter(drawn(3, seed=2)), nn.Parameter(drawn(4, seed=3))]
    weights, biases = flat(*matrices), flat(*vectors)
    gradients = [torch.zeros_like(weights), torch.zeros_like(biases)]
    ours = FlatOptimizer(
        [
            shard(weights[:7], gradients[0][:7], True, True),
            shard(weights[7:], gradients[0][7:], True, True),
            shard(biases, gradients[1], False, True),
        ],
        CONFIG,
    )
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=CONFIG.learning_rate,
        betas=CONFIG.betas,
        eps=CONFIG.eps,
        foreach=False,
    )
    for step in range(5):
        for i, parameter in enumerate(matrices + vectors):
            parameter.grad = drawn(*parameter.shape, seed=10 * step + i)
        gradients[0].copy_(flat(*(p.grad for p in matrices if p.grad is not None)) / factor)
        gradients[1].copy_(flat(*(p.grad for p in vectors if p.grad is not None)) / factor)
        rate = 1e-2 / (step + 1)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        ours.step(rate, factor)
        torch.testing.assert_close(weights, flat(*matrices), rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(biases, flat(*vectors), rtol=1e-13, atol=1e-14)


SGD = CONFIG.model_copy(update={"name": "sgd", "momentum": 0.8})


@pytest.mark.parametrize(
    "config", [SGD, SGD.model_copy(update={"momentum": 0.0})], ids=["momentum", "plain"]
)
def test_sgd_is_torch_s(config: Optimizer) -> None:
    weights, biases = drawn(12, seed=0), drawn(3, seed=1)
    theirs = [nn.Parameter(weights.clone()), nn.Parameter(biases.clone())]
    gradients = [torch.zeros_like(weights), torch.zeros_like(biases)]
    ours = FlatOptimizer(
        [shard(weights, gradients[0], True, True), shard(biases, gradients[1], False, True)], config
    )
    sgd = torch.optim.SGD(
        [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=1e-2,
        momentum=config.momentum,
        foreach=False,
    )
    for step in range(4):
        for i, (parameter, gradient) in enumerate(zip(theirs, gradients, strict=True)):
            parameter.grad = drawn(*parameter.shape, seed=10 * step + i)
            gradient.copy_(parameter.grad)
        sgd.step()
        ours.step(1e-2, 1.0)
        torch.testing.assert_close(flat(weights, biases), flat(*theirs), rtol=1e-13, atol=1e-14)
    assert list(read_states(ours, 0)[0]) == (["momentum"] if config.momentum else [])


IN_8_BITS = CONFIG.model_copy(update={"name": "adamw8bit", "block_size": 8})


@pytest.mark.parametrize("config", [CONFIG, IN_8_BITS, SGD], ids=["adamw", "adamw8bit", "sgd"])
def test_states_go_out_and_come_back(config: Optimizer) -> None:
    """Saved after three steps and restored into a new optimizer,
    the fourth step gives the same bits.
    """

    def fresh(weights: Tensor) -> tuple[FlatOptimizer, Tensor]:
        gradient = torch.zeros_like(weights)
        is_eight_bit = config.name == "adamw8bit"
        return FlatOptimizer(
            [shard(weights, gradient, True, True, is_eight_bit=is_eight_bit)], config
        ), gradient

    weights = drawn(11, seed=0)
    first, gradient = fresh(weights)
    states, steps = read_states(first, 0)
    assert (
        steps == 0
        and tuple(states) == states_of(config)
        and not any(state.any() for state in states.values())
    )
    for step in range(3):
        gradient.copy_(drawn(11, seed=step))
        first.step(1e-2, 1.0)
    states, steps = read_states(first, 0)
    assert steps == 3 and all(state.all() for state in states.values())
    copied = weights.clone()
    second, other_gradient = fresh(copied)
    restore_states(second, 0, {name: state.clone() for name, state in states.items()}, steps)
    for optimizer, found in ((first, gradient), (second, other_gradient)):
        found.copy_(drawn(11, seed=3))
        optimizer.step(1e-2, 1.0)
    assert torch.equal(weights, copied)
    assert read_states(second, 0)[1] == 4


def test_the_norm_is_of_what_is_counted_here() -> None:
    """Shards that another rank counts are left out; the sum of squares is float64."""
    gradients = [drawn(5, seed=0).float(), drawn(7, seed=1).float(), drawn(0, seed=2).float()]
    counted = [True, False, True]
    shards = [
        shard(torch.zeros_like(gradient), gradient, True, count)
        for gradient, count in zip(gradients, counted, strict=True)
    ]
    found = FlatOptimizer(shards, CONFIG).square_norm()
    assert found.dtype == torch.float64 and found.dim() == 0
    assert float(found) == pytest.approx(float(gradients[0].double().square().sum()), rel=1e-6)


def test_the_norm_covers_gradients_on_the_host_and_on_the_device() -> None:
    """ZeRO-3 with offload has dense gradients in host memory,
    and experts that it does not shard on the GPU.
    """
    gradients = [drawn(5, seed=0), drawn(7, seed=1).to("meta"), drawn(3, seed=2)]
    shards = [shard(torch.zeros_like(gradient), gradient, True, True) for gradient in gradients]
    found = FlatOptimizer(shards, CONFIG).square_norm()
    assert found.device.type == "meta" and found.dtype == torch.float64 and found.dim() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_shows_in_the_norm(value: float) -> None:
    gradient = torch.tensor([1.0, value, 2.0])
    found = FlatOptimizer([shard(torch.zeros(3), gradient, True, True)], CONFIG).square_norm()
    assert not math.isfinite(float(found))


def test_nothing_to_step() -> None:
    """A stage of activations alone."""
    optimizer = FlatOptimizer([], CONFIG)
    assert float(optimizer.square_norm()) == 0.0
    optimizer.step(1e-2, 0.5)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 50.0])
@pytest.mark.parametrize("clip_norm", [0.5, 1.0])
def test_clipping_is_torch_s(scale: float, clip_norm: float) -> None:
    parameters = [nn.Parameter(drawn(3, 4, seed=0)), nn.Parameter(drawn(5, seed=1))]
    for i, parameter in enumerate(parameters):
        parameter.grad = scale * drawn(*parameter.shape, seed=i + 5)
    before = flat(*(p.grad for p in parameters if p.grad is not None))
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    after = flat(*(p.grad for p in parameters if p.grad is not None))
    torch.testing.assert_close(
        before * clip_factor(float(norm), clip_norm), after, rtol=1e-14, atol=0
    )


def test_clipping_can_be_turned_off() -> None:
    assert clip_factor(1e9, 0.0) == 1.0


def test_each_shard_is_sent_on_once_it_is_stepped() -> None:
    """``after_step`` starts the all-gather of the weights: once per shard and step, in order,
    after the update.
    """
    weights = [drawn(3, seed=0), drawn(4, seed=1)]
    before = [each.clone() for each in weights]
    sent: list[int] = []

    def sending(index: int) -> None:
        assert not torch.equal(weights[index], before[index])
        assert ours.parameters[index].grad is None
        sent.append(index)

    shards = [
        shard(each, drawn(*each.shape, seed=2), True, True)._replace(
            after_step=partial(sending, index)
        )
        for index, each in enumerate(weights)
    ]
    ours = FlatOptimizer(shards, CONFIG, order=[1, 0])
    ours.step(1e-2, 1.0)
    ours.step(1e-2, 0.5)
    assert sent == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", FlatAdamW), ("adamw8bit", FlatAdamW), ("sgd", FlatSGD)]
)
def test_the_optimizer_that_is_configured(name: str, kind: type[torch.optim.Optimizer]) -> None:
    ours = FlatOptimizer(
        [shard(drawn(64, seed=0), drawn(64, seed=1), True, True, is_eight_bit=name == "adamw8bit")],
        CONFIG.model_copy(update={"name": name, "block_size": 32}),
    )
    codecs = {type(group["codec"]) for group in ours.inner.param_groups if group["params"]}
    assert type(ours.inner) is kind
    assert codecs == {BlockCodec if name == "adamw8bit" else type(NUMBERS)}


def test_a_state_under_another_name_is_not_saved_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, gradient = drawn(4, seed=0), drawn(4, seed=1)
    optimizer = FlatOptimizer([shard(weights, gradient, True, True)], SGD)
    optimizer.step(1e-2, 1.0)
    assert read_states(optimizer, 0)[0]["momentum"].all()
    monkeypatch.setitem(FlatSGD.in_torch, "momentum", "velocity")  # type: ignore[arg-type]
    with pytest.raises(
        KeyError, match=r"SGD has states \['momentum_buffer'\], and none for \['momentum'\]"
    ):
        read_states(optimizer, 0)
