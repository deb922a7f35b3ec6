"""AdamW with bfloat16 states on flat shards: the same bits for every cut,
and rounding that is right on average.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.optimizer import ShardLayout, read_states
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.rounded import (
    RoundedCodec,
    ShardPlace,
    round_stochastically,
    whole_positions,
)
from meshwright.parameters import ParameterInfo, Slice
from meshwright.verify.plain_optimizer import plain_optimizer

CONFIG = Optimizer(
    learning_rate=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6, state_dtype="bfloat16"
)
SEED, STEPS = 7, 3
WHOLE = {"up": (6, 5), "down": (4, 3, 2)}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def infos_of(tp_rank: int, tp: int) -> list[ParameterInfo]:
    """``up`` cut by rows, ``down`` by its second dim of 3,
    of which the last rank has a padded part.
    """
    if tp == 1:
        return [ParameterInfo(name, shape) for name, shape in WHOLE.items()]
    cut = {
        "up": Slice(0, 3 * tp_rank, 3 * tp_rank + 3, 3),
        "down": Slice(1, 2 * tp_rank, min(2 * tp_rank + 2, 3), 2),
    }
    return [ParameterInfo(name, shape, cut[name]) for name, shape in WHOLE.items()]


def trained(tp: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Weights and moments of all ranks of a layout, put together; pieces have 7 elements."""
    monkeypatch.setitem(RoundedCodec.together, "cpu", 7)  # type: ignore[arg-type]
    found = {
        f"{kind}/{n}": torch.zeros(s).double()
        for kind in ("w", "exp_avg", "exp_avg_sq")
        for n, s in WHOLE.items()
    }
    for tp_rank in range(tp):
        infos = infos_of(tp_rank, tp)
        starts = [0, math.prod(infos[0].local_shape)]
        numel = math.prod(infos[1].local_shape) + starts[1]
        numel += -numel % shards

        def flat(
            values: list[Tensor], infos: list[ParameterInfo] = infos, numel: int = numel
        ) -> Tensor:
            parts = torch.cat(
                [info.take(value).flatten() for info, value in zip(infos, values, strict=True)]
            )
            return torch.cat([parts, parts.new_zeros(numel - len(parts))])

        weights, per = (
            flat([drawn(*shape, seed=i) for i, shape in enumerate(WHOLE.values())]),
            numel // shards,
        )
        gradient = torch.zeros_like(weights)
        slots = tuple(zip(infos, starts, strict=True))
        optimizers = []
        for k in range(shards):
            own, grad = (each[k * per : (k + 1) * per] for each in (weights, gradient))
            layout = ShardLayout(ShardPlace(slots, k * per, SEED))
            call = (lambda grad=grad: grad, lambda: None)
            optimizers.append(
                FlatOptimizer(
                    [OptimizerShard(own, grad, True, False, *call, layout=layout)], CONFIG
                )
            )
        for step in range(STEPS):
            gradient.copy_(flat([drawn(*shape, seed=9 + step) for shape in WHOLE.values()]))
            for optimizer in optimizers:
                optimizer.step(1e-2, 1.0)
        moments = [read_states(optimizer, 0)[0] for optimizer in optimizers]
        kinds = {"w": weights} | {
            name: torch.cat([each[name] for each in moments]) for name in moments[0]
        }
        for kind, values in kinds.items():
            for info, start in slots:
                part = info.unpadded(
                    values[start : start + math.prod(info.local_shape)].view(info.local_shape)
                )
                into = found[f"{kind}/{info.name}"]
                if info.slice is not None:
                    into = into.narrow(
                        info.slice.dim, info.slice.start, info.slice.stop - info.slice.start
                    )
                into.copy_(part)
    return found


@pytest.mark.parametrize(("tp", "shards"), [(1, 2), (1, 5), (2, 1), (2, 3)])
def test_every_cut_gives_the_same_bits(
    tp: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = trained(1, 1, monkeypatch), trained(tp, shards, monkeypatch)
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name
    assert all(
        torch.equal(t, t.bfloat16().double())
        for name, t in whole.items()
        if not name.startswith("w")
    )


def test_the_bits_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain run's optimizer, which computes them by numpy."""
    parameters = {
        name: nn.Parameter(drawn(*shape, seed=i)) for i, (name, shape) in enumerate(WHOLE.items())
    }
    plain = plain_optimizer(parameters, CONFIG, {}, {}, torch.float64, SEED)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = drawn(*WHOLE[name], seed=9 + step)
        plain.step()
    for name, tensor in trained(1, 1, monkeypatch).items():
        if name.startswith("w/"):
            torch.testing.assert_close(
                tensor, parameters[name.removeprefix("w/")].detach(), rtol=1e-12, atol=1e-13
            )


def test_positions_of_a_slice_are_those_of_the_whole() -> None:
    whole = torch.arange(24).view(4, 3, 2)
    info = infos_of(0, 2)[1]
    assert whole_positions(info, torch.arange(16)).tolist() == info.take(whole).flatten().tolist()


def test_rounding_is_right_on_average_and_only_between_neighbours() -> None:
    """A third of the way between 1 and 1 + 2^-7: two values,
    with a mean within 5 standard deviations.
    """
    wide = torch.full((30_000,), 1 + 2**-7 / 3)
    random = ShardPlace(((ParameterInfo("w", (30_000,)), 0),), 0, SEED).bits(
        0, 30_000, 0, torch.device("cpu")
    )
    rounded = round_stochastically(wide, random).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert abs(float((rounded > 1).float().mean()) - 1 / 3) < 5 * (2 / 9 / 30_000) ** 0.5
    exact = torch.tensor([0.0, -2.5, 2.0**-130])
    assert round_stochastically(exact, torch.full((3,), 0xFFFF)).tolist() == [0.0, -2.5, 2.0**-130]
