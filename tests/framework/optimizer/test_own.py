"""Optimizers and schedules by import path: element-wise ones are taken with their state,
all others refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.optimizer import (
    add_state,
    default_decay,
    peak_rate,
    read_states,
    restore_states,
    states_of,
)
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.optimizer.own_trial import element_states
from meshwright.parameters import GroupSettings
from tests.support.errors import raises

HERE, KINDS = "tests.framework.optimizer.test_own", "tests.framework.optimizer.own_kinds"


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
        ("torch.optim:NAdam", {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
        ("torch.optim:ASGD", {"ax"}, {"step", "eta", "mu"}),
        (f"{KINDS}:Momentum", {"momentum"}, {"step"}),
        (f"{KINDS}:OwnTable", set(), {"step"}),
    ],
)
def test_element_wise_optimizers_are_taken(
    builder: str, states: set[str], counters: set[str]
) -> None:
    found = element_states(own(builder))
    assert (
        set(found.names) == states == set(states_of(own(builder)))
        and set(found.numbers) == counters
    )


@pytest.mark.parametrize(
    ("builder", "code", "text"),
    [
        ("TrustRatio", "MW-OPTIM-004", "a tensor is cut in two"),
        ("torch.optim:LBFGS", "MW-OPTIM-003", "closure"),
        ("torch.optim:Muon", "MW-OPTIM-003", "2D"),
        ("CountsInGroup", "MW-OPTIM-005", "k in its parameter groups"),
        ("CountsOutside", "MW-OPTIM-005", "after a resume"),
        ("KeepsRows", "MW-OPTIM-005", "state['row'], of shape (1,)"),
        ("NamedWeights", "MW-OPTIM-005", "state['weights']"),
        ("no_optimizer", "MW-OPTIM-003", "returned a int"),
        ("half_of_them", "MW-OPTIM-003", "0 of 1 parameters"),
        ("missing", "MW-CONFIG-010", "has no function missing"),
        ("exits", "MW-OPTIM-003", "SystemExit"),
        (f"{KINDS}:DecaysMatrices", "MW-OPTIM-009", "a tensor of 4x6"),
        (f"{KINDS}:Centralised", "MW-OPTIM-009", "a tensor of 4x6"),
        (f"{KINDS}:LargeMatrices", "MW-OPTIM-009", "model.parameter_groups"),
        (f"{KINDS}:Convolutions", "MW-OPTIM-009", "a tensor of 160x12x3x4"),
        (f"{KINDS}:Noisy", "MW-OPTIM-004", "draws random numbers"),
        (f"{KINDS}:NoisyByNumpy", "MW-OPTIM-004", "draws random numbers"),
        (f"{KINDS}:NoisyByPython", "MW-OPTIM-004", "draws random numbers"),
        (f"{KINDS}:CountsInModule", "MW-OPTIM-004", "counts elsewhere"),
        (f"{KINDS}:CountsInAttribute", "MW-OPTIM-005", "attribute k"),
        (f"{KINDS}:CountsInHelper", "MW-OPTIM-005", "attribute clock.ticks"),
        (f"{KINDS}:CountsBeside", "MW-OPTIM-005", "after a resume"),
        (f"{KINDS}:FirstGroup", "MW-OPTIM-004", "groups come in another order"),
        (f"{KINDS}:Clipped", "MW-OPTIM-004", "cut in two"),
        (f"{KINDS}:Normed", "MW-OPTIM-004", "cut in two"),
        (f"{KINDS}:TopHalf", "MW-OPTIM-004", "cut in two"),
    ],
)
def test_all_others_are_refused_by_name(builder: str, code: str, text: str) -> None:
    with raises(code, text, builder):
        element_states(own(builder))


@pytest.mark.parametrize("late", [10, 60])
def test_states_and_rules_that_begin_within_the_trial_are_seen(late: int) -> None:
    assert element_states(own(f"{KINDS}:Momentum", late=late)).names == ("momentum",)
    assert set(element_states(own(f"{KINDS}:Averaged", late=late)).numbers) == {"step", "averaged"}
    assert element_states(own(f"{KINDS}:Lookahead", late=late // 2)).names == ("slow",)
    with raises("MW-OPTIM-004"):
        element_states(own(f"{KINDS}:Normed", late=late))


def test_a_rule_for_large_tensors_is_seen() -> None:
    for size in (1000, 20_000):
        with raises("MW-OPTIM-004"):
            element_states(own(f"{KINDS}:BySize", late=size))


def test_a_trial_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1), torch.rand(1)
    torch.manual_seed(3)
    first = torch.rand(1)
    with raises("MW-OPTIM-004"):
        element_states(own(f"{KINDS}:Noisy", late=1))
    assert (first, torch.rand(1)) == expected


@pytest.mark.parametrize(
    ("builder", "options", "rate", "decay"),
    [
        ("with_values", {}, 0.25, 0.5),
        ("with_values", {"lr": 0.1, "weight_decay": 0.9}, 0.1, 0.9),
        ("in_code", {}, 0.125, 0.75),
        ("torch.optim:AdamW", {}, 1e-3, 0.01),
        ("torch.optim:AdamW", {"weight_decay": 0.0}, 1e-3, 0.0),
        ("Base", {}, 3e-4, 0.1),
    ],
)
def test_keys_that_are_not_set_leave_the_builders_values(
    builder: str, options: dict[str, float], rate: float, decay: float
) -> None:
    config = own(builder if ":" in builder else f"{KINDS}:{builder}", **options)
    assert (config.learning_rate, config.weight_decay) == (None, None)
    assert (peak_rate(config), default_decay(config)) == (rate, decay)
    optimizer = FlatOptimizer([_shard(torch.ones(4), torch.ones(4))], config)
    assert {g["weight_decay"] for g in optimizer.inner.param_groups} == {decay}
    given = config.model_copy(update={"learning_rate": 3e-4, "weight_decay": 0.1})
    assert (peak_rate(given), default_decay(given)) == (3e-4, 0.1)
    assert learning_rate(given, 0, 10) < learning_rate(config, 0, 10) or rate == 3e-4


def test_a_least_rate_above_the_builders_is_refused() -> None:
    config = Optimizer(builder=f"{KINDS}:with_values", min_learning_rate=0.3)
    with raises("MW-OPTIM-011", "0.3 is above 0.25"):
        learning_rate(config, 0, 10)


def test_a_group_that_mixes_learning_rates_is_refused() -> None:
    shards = [_shard(torch.ones(4), torch.ones(4), factor) for factor in (1.0, 0.5)]
    with raises("MW-OPTIM-003", "other learning rates"):
        FlatOptimizer(shards, own("one_group"))


def _shard(
    weights: Tensor, gradient: Tensor, factor: float = 1.0, decay: float | None = None
) -> OptimizerShard:
    return OptimizerShard(
        weights,
        gradient,
        True,
        False,
        lambda: gradient,
        lambda: None,
        settings=GroupSettings(rate_factor=factor, weight_decay=decay),
    )


def test_flat_shards_step_as_torch_does_on_parameters_and_go_on_after_a_restore() -> None:
    """Adagrad on two shards with factors and decays of their own, restored in the middle."""
    draw = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(2, 6, generator=draw), torch.randn(6, 2, 6, generator=draw)
    config = Optimizer(builder="torch.optim:Adagrad", options={"eps": 1e-3}, weight_decay=0.1)
    plain = [nn.Parameter(row.clone()) for row in start]
    theirs = torch.optim.Adagrad(
        [{"params": [plain[0]], "weight_decay": 0.2}, {"params": [plain[1]], "weight_decay": 0.1}],
        eps=1e-3,
    )
    weights, flat = start.clone(), torch.zeros(2, 6)

    def make() -> FlatOptimizer:
        return FlatOptimizer(
            [_shard(weights[0], flat[0], 0.5, 0.2), _shard(weights[1], flat[1])], config
        )

    ours = make()
    for step, gradient in enumerate(gradients):
        if step == 3:
            states = [read_states(ours, index) for index in range(2)]
            ours = make()
            for index, (tensors, steps) in enumerate(states):
                restore_states(
                    ours, index, {name: tensor.clone() for name, tensor in tensors.items()}, steps
                )
        flat.copy_(gradient)
        ours.step(0.1 / (step + 1), 1.0)
        for parameter, row, group, factor in zip(
            plain, gradient, theirs.param_groups, (0.5, 1.0), strict=True
        ):
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
    with raises(code, text):
        learning_rate(Optimizer(schedule=f"{HERE}:{name}"), 0, 8)


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
