"""Optimizers and schedules by import path: element-wise ones are taken with their state, all others refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.errors import ConfigError
from meshwright.optimizer import add_state, read_states, restore_states, states_of
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.optimizer.own import element_states
from meshwright.parameters import GroupSettings
from tests.support.errors import has_code

HERE = "tests.optimizer.test_own"


class _Signed(torch.optim.Optimizer):
    """Sign of an average of the gradients; the base of the broken ones below."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        average.lerp_(gradient, 0.1)
        p.add_(average.sign(), alpha=-group["lr"])


class TrustRatio(_Signed):
    """LAMB's: the step is scaled by the norm of the whole tensor."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        p.add_(gradient, alpha=-group["lr"] * float(p.norm() / gradient.norm()))


class CountsInGroup(_Signed):
    """Schedule-free's: a counter in the group."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        super().update(p, gradient, group)


class CountsOutside(_Signed):
    """Number of steps in an attribute, which a resumed run starts from zero again."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.seen: dict[Tensor, int] = {}

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.seen[p] = self.seen.get(p, 0) + 1
        p.add_(gradient, alpha=-group["lr"] / self.seen[p])


class KeepsRows(_Signed):
    """Adafactor's: a state that is smaller than the parameter."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.state[p]["row"] = gradient.square().mean(0, keepdim=True)
        p.add_(gradient.sign(), alpha=-group["lr"])


class NamedWeights(_Signed):
    """A state with a name that a checkpoint needs."""

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.state[p]["weights"] = gradient.clone()


def no_optimizer(groups: Any) -> int:
    return 3


def half_of_them(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": group["params"][:-1]} for group in groups], lr=1.0)


def one_group(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for group in groups for p in group["params"]], lr=1.0)


def own(builder: str, **options: Any) -> Optimizer:
    return Optimizer(builder=builder if ":" in builder else f"{HERE}:{builder}", options=options)


@pytest.mark.parametrize(
    ("builder", "states", "counters"),
    [
        ("torch.optim:RAdam", {"exp_avg", "exp_avg_sq"}, {"step"}),
        ("torch.optim:Adagrad", {"sum"}, {"step"}),
        ("torch.optim:RMSprop", {"square_avg"}, {"step"}),
        ("torch.optim:Adamax", {"exp_avg", "exp_inf"}, {"step"}),
        ("torch.optim:Rprop", {"prev", "step_size"}, {"step"}),
        ("_Signed", {"average"}, set()),
    ],
)
def test_element_wise_optimizers_are_taken(builder: str, states: set[str], counters: set[str]) -> None:
    found = element_states(own(builder))
    assert set(found.names) == states == set(states_of(own(builder))) and set(found.counters) == counters


@pytest.mark.parametrize(
    ("builder", "code", "text"),
    [
        ("TrustRatio", "MW-OPTIM-004", "a tensor is cut in two"),
        ("torch.optim:LBFGS", "MW-OPTIM-003", "closure"),
        ("torch.optim:Muon", "MW-OPTIM-003", "2D"),
        ("torch.optim:NAdam", "MW-OPTIM-005", "mu_product"),
        ("CountsInGroup", "MW-OPTIM-005", "k in its parameter groups"),
        ("CountsOutside", "MW-OPTIM-005", "after a resume"),
        ("KeepsRows", "MW-OPTIM-005", "state['row'], of shape (1,)"),
        ("NamedWeights", "MW-OPTIM-005", "state['weights']"),
        ("no_optimizer", "MW-OPTIM-003", "returned a int"),
        ("half_of_them", "MW-OPTIM-003", "0 of 1 parameters"),
        ("missing", "MW-CONFIG-010", "has no function missing"),
        ("exits", "MW-OPTIM-003", "SystemExit"),
    ],
)
def test_all_others_are_refused_by_name(builder: str, code: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        element_states(own(builder))
    assert caught.value.code == code and text in caught.value.message and builder in caught.value.message


def test_a_group_that_mixes_learning_rates_is_refused() -> None:
    shards = [_shard(torch.ones(4), torch.ones(4), factor) for factor in (1.0, 0.5)]
    with pytest.raises(ConfigError, check=has_code("MW-OPTIM-003")) as caught:
        FlatOptimizer(shards, own("one_group"))
    assert caught.value.code == "MW-OPTIM-003" and "other learning rates" in caught.value.message


def _shard(weights: Tensor, gradient: Tensor, factor: float = 1.0, decay: float | None = None) -> OptimizerShard:
    return OptimizerShard(
        weights,
        gradient,
        True,
        False,
        True,
        lambda: gradient,
        lambda: None,
        settings=GroupSettings(rate_factor=factor, weight_decay=decay),
    )


def test_flat_shards_step_as_torch_does_on_parameters_and_go_on_after_a_restore() -> None:
    """Adagrad on two shards with factors and decays of their own, restored in the middle."""
    draw = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(2, 6, generator=draw), torch.randn(6, 2, 6, generator=draw)
    config = own("torch.optim:Adagrad", eps=1e-3)
    plain = [nn.Parameter(row.clone()) for row in start]
    theirs = torch.optim.Adagrad(
        [{"params": [plain[0]], "weight_decay": 0.2}, {"params": [plain[1]], "weight_decay": 0.1}], eps=1e-3
    )
    weights, flat = start.clone(), torch.zeros(2, 6)

    def make() -> FlatOptimizer:
        return FlatOptimizer([_shard(weights[0], flat[0], 0.5, 0.2), _shard(weights[1], flat[1])], config)

    ours = make()
    for step, gradient in enumerate(gradients):
        if step == 3:
            states = [read_states(ours, index) for index in range(2)]
            ours = make()
            for index, (tensors, steps) in enumerate(states):
                restore_states(ours, index, {name: tensor.clone() for name, tensor in tensors.items()}, steps)
        flat.copy_(gradient)
        ours.step(0.1 / (step + 1), 1.0)
        for parameter, row, group, factor in zip(plain, gradient, theirs.param_groups, (0.5, 1.0), strict=True):
            parameter.grad, group["lr"] = row.clone(), 0.1 / (step + 1) * factor
        theirs.step()
    for ours_row, theirs_row in zip(weights, plain, strict=True):
        torch.testing.assert_close(ours_row, theirs_row.detach(), rtol=1e-6, atol=1e-7)


def halves(step: int, num_steps: int) -> float:
    return 0.5 ** (step * 4 // num_steps)


def negative(step: int, num_steps: int) -> float:
    return -1.0


def fails(step: int, num_steps: int) -> float:
    return 1.0 / step


def beyond_a_float(step: int, num_steps: int) -> int:
    return 10**400


def exits(*arguments: Any) -> Any:
    raise SystemExit(0)


def test_a_schedule_is_a_function_of_the_step() -> None:
    optimizer = Optimizer(learning_rate=0.2, schedule=f"{HERE}:halves")
    assert [learning_rate(optimizer, step, 8) for step in (0, 2, 7)] == [0.2, 0.1, 0.025]


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("negative", "MW-OPTIM-007", "returned -1.0 for step 0"),
        ("fails", "MW-OPTIM-006", "division"),
        ("beyond_a_float", "MW-OPTIM-007", "for step 0 of 8"),
        ("exits", "MW-OPTIM-006", "SystemExit"),
    ],
)
def test_a_schedule_that_fails_is_named(name: str, code: str, text: str) -> None:
    with pytest.raises(ConfigError, check=has_code("MW-OPTIM-006", "MW-OPTIM-007")) as caught:
        learning_rate(Optimizer(schedule=f"{HERE}:{name}"), 0, 8)
    assert caught.value.code == code and text in caught.value.message


def test_states_of_callbacks_start_as_the_weights() -> None:
    weights = torch.arange(4.0)
    optimizer = FlatOptimizer([_shard(weights, torch.zeros(4))], Optimizer())
    (added,) = add_state(optimizer, "ema")
    weights += 1
    assert added.tolist() == [0, 1, 2, 3] and optimizer.added == {"ema": [added]}
    for name in ("exp_avg", "ema", "weights", "master", "_ema", "é", "a/b", "", "a" * 65):
        with pytest.raises(ValueError, match="choose another name"):
            add_state(optimizer, name)
    assert list(optimizer.added) == ["ema"]
