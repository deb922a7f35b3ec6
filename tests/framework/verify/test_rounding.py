"""Weights whose exact gradient is zero: rounding alone is no difference,
and a wrong tiny gradient is one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.config import RunConfig
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.verify import Verification, compare, layout_config, parse_layout
from meshwright.verify.rank import merge, run_layout
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import config_of
from tests.support.run import run_broken

STEPS, GLOBAL_BATCH, LAYOUT = 2, 4, parse_layout("dp2")


def config() -> RunConfig:
    return config_of(
        "tests.framework.verify.models:cancelled",
        {"vocab_size": 13},
        6,
        optimizer={"clip_norm": 0.0},
    )


@pytest.fixture(scope="module")
def verification() -> Verification:
    """The plain runs, shared by the tests of this module."""
    return Verification(config(), global_batch=GLOBAL_BATCH, steps=STEPS, random_tokens=True)


def test_rounding_of_a_zero_gradient_is_no_difference(
    verification: Verification, pool: RankPool
) -> None:
    text = layout_config(config(), LAYOUT, GLOBAL_BATCH, "float64").model_dump_json()
    found = merge(pool.run(run_layout, LAYOUT.size, text, STEPS, True))
    strict = compare("dp2", found, None, verification._reference(1).findings, TOLERANCES["float64"])
    assert strict.problems and strict.weights_name.endswith("shift"), strict
    rounding = verification._rounding(1)
    for errors, bound in ((rounding.weights, 1e-10), (rounding.gradients, 1e-11)):
        assert sorted(sorted(errors, key=lambda name: -errors[name])[:2]) == ["1.shift", "2.shift"]
        assert max(error for name, error in errors.items() if "shift" not in name) < bound
    assert verification.compare_layout(LAYOUT, pool).passed


def a_share_of_another_gradient(patch: pytest.MonkeyPatch) -> None:
    """From step 2 on the cancelled bias gets 1e-10 of its neighbour's gradient."""
    step = FlatOptimizer._step

    def leaking(optimizer: FlatOptimizer, *args: object) -> None:
        if optimizer.num_steps > 0:
            for shard in optimizer.shards:
                if not shard.decays:
                    shard.gradient.add_(shard.gradient.abs().max() * 1e-10)
        step(optimizer, *args)  # type: ignore[arg-type]

    patch.setattr(FlatOptimizer, "_step", leaking)


def a_faint_gradient_lost(patch: pytest.MonkeyPatch) -> None:
    """From step 2 on gradients below 1e-9 are taken for rounding."""
    step = FlatOptimizer._step

    def losing(optimizer: FlatOptimizer, *args: object) -> None:
        if optimizer.num_steps > 0:
            for shard in optimizer.shards:
                shard.gradient.masked_fill_(shard.gradient.abs() < 1e-9, 0.0)
        step(optimizer, *args)  # type: ignore[arg-type]

    patch.setattr(FlatOptimizer, "_step", losing)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each for each in (a_share_of_another_gradient, a_faint_gradient_lost)
}


@pytest.mark.parametrize("broken", FAULTS)
def test_a_wrong_tiny_gradient_is_seen(
    broken: str, verification: Verification, pool: RankPool
) -> None:
    text = layout_config(config(), LAYOUT, GLOBAL_BATCH, "float64").model_dump_json()
    found = merge(pool.run(run_broken, LAYOUT.size, FAULTS[broken], text, STEPS))
    expected, rounding = verification._reference(1).findings, verification._rounding(1)
    row = compare(
        "dp2", found, None, expected, TOLERANCES["float64"], rounding.weights, rounding.noise
    )
    assert any(problem.startswith("weights after 2 steps") for problem in row.problems), (
        row,
        rounding,
    )
