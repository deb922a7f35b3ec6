"""A user's optimizer long after its trial: late states are saved,
late rules that a shard cannot follow are refused.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.errors import ConfigError
from meshwright.mesh.comm import Group
from meshwright.optimizer import add_state, read_record, read_states, restore_states
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.own_states import OwnStates, StateNumber
from tests.support.errors import raises

KINDS = "tests.framework.optimizer.own_kinds"
ALONE = Group("world", (0,), 0)
LATE = 100
"""Steps after which the rules below begin: after the trial, which has 64."""


class Run:
    """Steps of one optimizer on numbers of two parameters in flat shards that are cut as told."""

    def __init__(
        self, kind: str, *cuts: int, dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        config = Optimizer(
            builder=f"{KINDS}:{kind}", options=options, weight_decay=0.1, learning_rate=0.01
        )
        draw = torch.Generator().manual_seed(1)
        self.weights = torch.randn(300, dtype=dtype, generator=draw)
        self.gradient = torch.zeros_like(self.weights)
        self.edges = [0, *cuts, 300]
        self.optimizer = FlatOptimizer(
            [self._shard(*ends) for ends in pairwise(self.edges)], config
        )
        assert self.optimizer.own is not None
        self.own = self.optimizer.own

    def _shard(self, start: int, stop: int) -> OptimizerShard:
        gradient = self.gradient[start:stop]
        return OptimizerShard(
            self.weights[start:stop],
            gradient,
            decays=start < 200,
            is_eight_bit=False,
            fetch_gradient=lambda: gradient,
            after_step=lambda: None,
            name_of=lambda element: "first" if start + element < 200 else "second",
        )

    def step(self, upto: int) -> None:
        """Step until ``upto`` steps are taken."""
        for number in range(self.optimizer.num_steps, upto):
            draw = torch.Generator().manual_seed(1000 + number)
            self.gradient.copy_(torch.randn(300, generator=draw, dtype=self.gradient.dtype))
            self.optimizer.step(0.01, 1.0)
            self.own.end_step(ALONE, self.optimizer.added)

    def saved(self) -> tuple[Any, dict[str, Tensor]]:
        """Return what a checkpoint holds: the record as JSON, and each state whole."""
        record = json.loads(json.dumps(self.own.agree(ALONE, self.optimizer.added).record()))
        every = [read_states(self.optimizer, index)[0] for index in range(len(self.edges) - 1)]
        return record, {name: torch.cat([states[name] for states in every]) for name in every[0]}

    def resume(self, record: Any, states: dict[str, Tensor], weights: Tensor, steps: int) -> None:
        """Take over what a checkpoint holds."""
        self.own.states = read_record(record)
        self.weights.copy_(weights)
        for index, (start, stop) in enumerate(pairwise(self.edges)):
            restore_states(
                self.optimizer, index, {n: t[start:stop].clone() for n, t in states.items()}, steps
            )


@pytest.mark.parametrize(
    ("kind", "options", "names", "numbers"),
    [
        ("Momentum", {"late": LATE}, ["momentum"], {"step": ["int", 120]}),
        ("Averaged", {"late": LATE}, ["mean"], {"step": ["int", 120], "averaged": ["int64", 20]}),
        ("Lookahead", {"late": LATE}, ["slow"], {"step": ["int", 120]}),
    ],
)
@pytest.mark.parametrize("at", [90, 120])
def test_a_state_that_begins_late_is_saved_and_restored_on_other_cuts(
    kind: str, options: Any, names: list[str], numbers: dict[str, Any], at: int
) -> None:
    whole, before = Run(kind, 200, **options), Run(kind, 123, 200, **options)
    whole.step(250)
    before.step(at)
    record, states = before.saved()
    if at == 120:
        assert record == {"tensors": names, "numbers": numbers} and list(states) == names
    else:
        assert record["tensors"] == [] and states == {}
    after = Run(kind, 7, 200, 211, **options)
    after.resume(record, states, before.weights, at)
    after.step(250)
    assert torch.equal(after.weights, whole.weights)


@pytest.mark.parametrize(
    ("kind", "options", "code", "parts"),
    [
        ("Normed", {"late": LATE}, "MW-OPTIM-010", ("in step 128 the weights of first",)),
        ("TopHalf", {"late": LATE}, "MW-OPTIM-010", ("in step 128 the weights of first",)),
        ("Noisy", {"late": LATE}, "MW-OPTIM-010", ("in step 128 the weights of first",)),
        ("NoisyByNumpy", {"late": LATE}, "MW-OPTIM-010", ("draw no random numbers",)),
        ("NoisyByPython", {"late": LATE}, "MW-OPTIM-010", ("earlier checkpoints are sound",)),
        ("CountsBeside", {"late": LATE}, "MW-OPTIM-010", ("in step 128",)),
        (
            "DecaysMatrices",
            {"late": LATE},
            "MW-OPTIM-009",
            ("in step 128, on first, gives other updates for a matrix",),
        ),
        (
            "Sizes",
            {"late": LATE},
            "MW-OPTIM-005",
            ("at step 128 keeps state['mean'], of shape (1, 1)",),
        ),
        *[
            (kind, {"late": LATE}, "MW-OPTIM-005", ("at step 128 keeps k in its parameter groups",))
            for kind in ("LateGroupCounter", "LateGroupTensor", "LateGroupArray")
        ],
        (
            "OnlyDecayed",
            {},
            "MW-OPTIM-005",
            ("at step 1 has another state['last'] of second than of first",),
        ),
    ],
)
def test_what_begins_late_is_refused_at_the_next_checked_step(
    kind: str, options: Any, code: str, parts: tuple[str, ...]
) -> None:
    run = Run(kind, 150, 200, **options)
    with raises(code, f"{KINDS}:{kind}") as caught:
        run.step(130)
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_a_step_that_is_saved_is_checked_and_so_is_the_next_one() -> None:
    run = Run("Normed", 200, late=LATE)
    run.step(110)
    run.own.request_check()
    with pytest.raises(ConfigError) as caught:
        run.step(111)
    assert "in step 111" in caught.value.message


@pytest.mark.parametrize("kind", ["Base", "Momentum", "Averaged"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_checks_change_nothing(kind: str, dtype: torch.dtype) -> None:
    checked, plain = (
        Run(kind, 77, 200, dtype=dtype, late=10),
        Run(kind, 77, 200, dtype=dtype, late=10),
    )
    plain.own.is_enabled = False
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    for number in range(1, 80):
        checked.own.request_check()
        checked.step(number)
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())
    plain.step(79)
    assert torch.equal(checked.weights, plain.weights)
    first, second = checked.saved(), plain.saved()
    assert first[0] == second[0] and all(
        torch.equal(first[1][name], second[1][name]) for name in first[1]
    )


def test_rounding_that_decides_an_update_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign of an average that cancels to its last bit:
    another vector width gives the other sign.
    """
    run = Run("Base", 200, dtype=torch.float32)
    copies: dict[float, list[Tensor]] = {}
    step_again = run.own._step_again

    def keep(parts: Any, sign: float, as_matrix: bool) -> Any:
        values = step_again(parts, sign, as_matrix)
        copies.setdefault(
            sign, [each.copied.clone() for each in values if each.what == "the weights"]
        )
        return values

    run.step(3)
    state = run.optimizer.inner.state[run.optimizer.parameters[0]]
    run.own.request_check()
    run.gradient.copy_(torch.randn(300, generator=torch.Generator().manual_seed(0)))
    state["average"].copy_(run.gradient[:200] * (-0.1 / 0.9))  # lerp: 0.9 average + 0.1 gradient
    monkeypatch.setattr(run.own, "_step_again", keep)
    run.optimizer.step(0.01, 1.0)
    run.own.end_step(ALONE, ())
    below, above = copies[-1.0][0], copies[1.0][0]
    assert bool((below != above).all())


def test_a_callbacks_state_keeps_its_name() -> None:
    run = Run("Momentum", 200, late=LATE)
    add_state(run.optimizer, "momentum")
    with pytest.raises(ConfigError) as caught:
        run.step(130)
    assert "state['momentum'], the name of a callback's state" in caught.value.message


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {"tensors": []},
        {"tensors": {}, "numbers": {}},
        {"tensors": ["a/b"], "numbers": {}},
        {"tensors": ["weights"], "numbers": {}},
        {"tensors": ["a", "a"], "numbers": {}},
        {"tensors": ["a"], "numbers": {"a": ["int", 1]}},
        {"tensors": [["a"]], "numbers": {}},
        {"tensors": [], "numbers": {"a": 1}},
        {"tensors": [], "numbers": {"a": ["complex", 1]}},
        {"tensors": [], "numbers": {"a": ["int", 1.5]}},
        {"tensors": [], "numbers": {"a": ["int", True]}},
        {"tensors": [], "numbers": {"a": ["bool", 1]}},
        {"tensors": [], "numbers": {"a": ["int64", 2**63]}},
        {"tensors": [], "numbers": {"a": [["int"], 1]}},
        {"tensors": [], "numbers": {"a": ["float", float("inf")]}},
        {"tensors": [f"s{i}" for i in range(65)], "numbers": {}},
    ],
)
def test_a_record_that_no_checkpoint_has_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match=r"needed|each state|is no|no kind"):
        read_record(record)


def test_a_record_is_read_as_it_was_written() -> None:
    numbers = {
        "a": StateNumber("float32", 20.0),
        "b": StateNumber("float", 0.1),
        "c": StateNumber("bool", True),
        "d": StateNumber("int", -3),
    }
    states = OwnStates(("x", "y"), numbers)
    assert read_record(json.loads(json.dumps(states.record()))) == states
    made = states.fill({}, torch.device("cpu"))
    assert (made["b"], made["c"], made["d"]) == (0.1, True, -3) and torch.equal(
        made["a"], torch.tensor(20.0)
    )
