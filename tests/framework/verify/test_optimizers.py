"""Optimizers beside AdamW in any layout against the plain run,
and the faults that others had with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import meshwright.build
import meshwright.optimizer.factored
import meshwright.optimizer.rounded
import meshwright.verify.rank
import meshwright.verify.reference
from meshwright.config import RunConfig
from meshwright.data_parallel.fsdp import FsdpLayers
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders
from meshwright.optimizer import ShardPlace, evaluated_weights
from meshwright.optimizer.factored import ShardedAdafactor
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.optimizer.lion import ShardedLion
from meshwright.verify import compare, layout_config, parse_layout
from meshwright.verify.rank import RankFindings, merge, run_layout
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, References, assert_agrees, model_config, size_for
from tests.support.marks import mark_all_rows_but, marked_rows
from tests.support.run import Break, nothing

OWN: dict[str, dict[str, Any]] = {
    "lion": {"name": "lion", "learning_rate": 1e-2, "betas": (0.9, 0.99)},
    "schedule_free_adamw": {
        "name": "schedule_free_adamw",
        "learning_rate": 1e-2,
        "schedule": "constant",
    },
    "adafactor": {"name": "adafactor", "learning_rate": 3e-2},
    "rounded": {"name": "adamw", "learning_rate": 1e-2, "state_dtype": "bfloat16"},
    "lion in blocks": {
        "name": "lion",
        "learning_rate": 1e-2,
        "betas": (0.9, 0.99),
        "state_dtype": "8bit",
        "block_size": 8,
    },
    "free in blocks": {
        "name": "schedule_free_adamw",
        "learning_rate": 1e-2,
        "schedule": "constant",
        "state_dtype": "8bit",
        "block_size": 8,
    },
    "lion rounded": {"name": "lion", "learning_rate": 1e-2, "state_dtype": "bfloat16"},
}
"""Keys of each optimizer."""


@pytest.fixture(scope="module")
def later() -> References:
    """Of runs that validate after the last two steps."""
    return References()


def with_own(config: RunConfig, name: str, **more: Any) -> RunConfig:
    return config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update=OWN[name] | more)}
    )


CASES = [
    ("lion", "gpt2", "dp2,pp2,zb_v,zero2", "float64"),
    ("lion", "llama", "dp2,pp2,tp2,zero3,sequence,full,mbs2", "float64"),
    ("lion", "gpt2", "dp2,tp2,zero0", "float32"),
    ("lion", "llama", "dp4,shard2,offload", "bfloat16"),
    ("adafactor", "gpt2", "dp2,pp2,zb_v,zero2", "float64"),
    ("adafactor", "llama", "dp2,pp2,tp2,zero3,sequence,full,mbs2", "float64"),
    ("adafactor", "gpt2", "dp2,tp2,zero0", "float32"),
    ("adafactor", "llama", "dp4,tp2,shard2", "bfloat16"),
    ("rounded", "gpt2", "dp2,pp2,zb_v,zero2", "float64"),
    ("rounded", "llama", "dp2,tp2,zero3,sequence,mbs2", "float64"),
    ("rounded", "gpt2", "dp4,tp2,shard2,offload", "float32"),
    ("schedule_free_adamw", "gpt2", "dp2,pp2,zb_v,zero2", "float64"),
    ("schedule_free_adamw", "gpt2", "dp2,tp2,zero3", "float64"),
    ("schedule_free_adamw", "llama", "dp2,pp2,tp2,zero1,sequence,full,mbs2", "float64"),
    ("schedule_free_adamw", "gpt2", "dp2,zero0,offload", "float32"),
    ("schedule_free_adamw", "llama", "dp4,shard2,zero2", "bfloat16"),
    ("lion in blocks", "gpt2", "dp2,tp2,zero3", "float64"),
    ("lion in blocks", "llama", "dp2,pp2,zb_v,zero2,offload", "float64"),
    ("free in blocks", "gpt2", "dp2,pp2,tp2,sequence,zero1", "float64"),
    ("lion rounded", "gpt2", "dp2,tp2,zero2", "float64"),
]
MORE = [
    ("gpt2", "dp2,pp2,tp2,interleaved_1f1b,zero0,sequence,full"),
    ("gpt2", "dp2,pp4,gpipe,zero2,step,full"),
    ("llama", "dp4,pp2,zb_v,zero3,shard2,selective"),
    ("llama", "dp2,pp2,tp2,zb_h2,zero1,sequence"),
    ("llama", "dp2,tp3,gpipe,mbs2"),
    ("gpt2", "dp3,pp2,zero0"),
    ("gpt2", "dp2,zero3,offload"),
    ("t5", "dp2,tp2,zero1"),
]


def _possible(name: str, layout: str) -> bool:
    return name != "adafactor" or "offload" not in layout


@marked_rows(
    "all_layouts",
    "lion-llama-dp2,pp2,tp2,zero3,sequence,full,mbs2-float64",
    "lion-gpt2-dp2,tp2,zero0-float32",
    "lion-llama-dp4,shard2,offload-bfloat16",
    "adafactor-gpt2-dp2,pp2,zb_v,zero2-float64",
    "adafactor-llama-dp2,pp2,tp2,zero3,sequence,full,mbs2-float64",
    "adafactor-gpt2-dp2,tp2,zero0-float32",
    "adafactor-llama-dp4,tp2,shard2-bfloat16",
    "rounded-gpt2-dp2,pp2,zb_v,zero2-float64",
    "rounded-llama-dp2,tp2,zero3,sequence,mbs2-float64",
    "rounded-gpt2-dp4,tp2,shard2,offload-float32",
    "schedule_free_adamw-gpt2-dp2,pp2,zb_v,zero2-float64",
    "schedule_free_adamw-gpt2-dp2,tp2,zero3-float64",
    "schedule_free_adamw-llama-dp2,pp2,tp2,zero1,sequence,full,mbs2-float64",
    "schedule_free_adamw-gpt2-dp2,zero0,offload-float32",
    "schedule_free_adamw-llama-dp4,shard2,zero2-bfloat16",
    "lion in blocks-llama-dp2,pp2,zb_v,zero2,offload-float64",
    "free in blocks-gpt2-dp2,pp2,tp2,sequence,zero1-float64",
    "lion rounded-gpt2-dp2,tp2,zero2-float64",
)
@pytest.mark.parametrize(
    ("name", "model", "layout", "dtype"),
    [
        *CASES,
        *(
            LATER(name, *case, "float64")
            for name in OWN
            for case in MORE
            if _possible(name, case[1])
        ),
    ],
)
def test_the_layout_gives_the_numbers_of_one_process(
    name: str, model: str, layout: str, dtype: str, pool: RankPool, references: References
) -> None:
    size, parsed = size_for(parse_layout(layout)), parse_layout(layout)
    config = with_own(model_config(model, size), name)
    assert_agrees(
        config, parsed, pool, references, global_batch=size.global_batch, steps=3, dtype=dtype
    )


def is_discontinuous(name: str, dtype: str) -> bool:
    """Lion in float32: averages that rounding moves across zero are larger
    than eps (docs/optimizers.md).
    """
    return name == "lion" and dtype == "float32"


@pytest.mark.all_layouts
@pytest.mark.parametrize(
    ("name", "model", "layout", "dtype"),
    [case for case in CASES if not is_discontinuous(case[0], case[3])],
)
def test_the_numbers_stay_so_over_ten_steps(
    name: str, model: str, layout: str, dtype: str, pool: RankPool, references: References
) -> None:
    size, parsed = size_for(parse_layout(layout)), parse_layout(layout)
    config = with_own(model_config(model, size), name)
    assert_agrees(
        config,
        parsed,
        pool,
        references,
        global_batch=size.global_batch,
        steps=10,
        dtype=dtype,
        twice=True,
    )


# ---------------------------------------------------------------------------------------------------------------
# traps


def the_sign_of_an_error(patch: pytest.MonkeyPatch) -> None:
    """Lion's paper: a gradient that is only rounding moves its weight
    by the whole learning rate.
    """
    step = ShardedLion._step

    def literal(
        optimizer: ShardedLion, parameter: Tensor, gradient: Tensor, group: dict[str, Any]
    ) -> None:
        step(optimizer, parameter, gradient, group | {"eps": 0.0})

    patch.setattr(ShardedLion, "_step", literal)


def validation_at_the_gradient_s_weights(patch: pytest.MonkeyPatch) -> None:
    """Schedule-free: the loss of y is taken for that of x."""
    patch.setattr(meshwright.verify.rank, "evaluating", lambda optimizer: nullcontext())


def training_on_at_the_average(patch: pytest.MonkeyPatch) -> None:
    """Schedule-free: x stays in place of y after a validation."""

    @contextmanager
    def left(optimizer: FlatOptimizer) -> Iterator[None]:
        for index, parameter in enumerate(optimizer.parameters):
            optimizer.shards[index].wait()  # the all-gather would race with the copy
            parameter.data.copy_(evaluated_weights(optimizer, index))
        yield

    patch.setattr(meshwright.verify.rank, "evaluating", left)


def stale_shared_weights(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-3: weights that modules share stay gathered after a validation, as x."""
    patch.setattr(FsdpLayers, "free_shared", lambda layers: None)


def bits_of_a_tp_rank_s_own_positions(patch: pytest.MonkeyPatch) -> None:
    """Each tp rank counts the elements of its part of a weight from zero."""
    patch.setattr(
        meshwright.optimizer.rounded, "whole_positions", lambda info, positions: positions
    )


def bits_of_a_shard_s_own_positions(patch: pytest.MonkeyPatch) -> None:
    """Each replica draws the bits of the bucket's first elements."""
    bits = ShardPlace.bits
    patch.setattr(ShardPlace, "bits", lambda place, *args: bits(place._replace(offset=0), *args))


def rounding_to_the_nearest(patch: pytest.MonkeyPatch) -> None:
    """No random bits at all."""
    patch.setattr(
        meshwright.optimizer.rounded, "round_stochastically", lambda wide, random: wide.bfloat16()
    )


def sums_of_the_replica_s_own_part(patch: pytest.MonkeyPatch) -> None:
    """Adafactor: squares are summed over tp alone, or over the shards alone."""
    open_holders = meshwright.build.open_holders

    def own_part(*arguments: Any, **more: Any) -> dict[str | None, Holders]:
        found = open_holders(*arguments, **more)
        return found | {"tp": found["tp"]._replace(parts=found["tp"].shard_group)}

    patch.setattr(meshwright.build, "open_holders", own_part)


def sums_that_are_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Adafactor: each shard has its own rows and columns."""
    step = ShardedAdafactor._step

    def alone(optimizer: ShardedAdafactor, holders: Group, weights: list[Any]) -> None:
        step(optimizer, Group("alone", (0,), 0), weights)

    patch.setattr(ShardedAdafactor, "_step", alone)


def columns_of_the_slice(patch: pytest.MonkeyPatch) -> None:
    """Adafactor: a tp rank counts its rows and columns from zero."""
    patch.setattr(
        meshwright.optimizer.factored, "whole_positions", lambda info, positions: positions
    )


class Trap(NamedTuple):
    """A fault, an optimizer and a layout that must see it, and what must be named."""

    broken: Break
    name: str
    layout: str
    said: str
    steps: int = 3


TRAPS = [
    Trap(the_sign_of_an_error, "lion", "tp2", "weights after 3 steps differ in"),
    Trap(validation_at_the_gradient_s_weights, "schedule_free_adamw", "dp2", "validation"),
    Trap(training_on_at_the_average, "schedule_free_adamw", "dp2,zero2", "loss of step 3"),
    Trap(sums_of_the_replica_s_own_part, "adafactor", "tp2", "weights after 3 steps differ in"),
    Trap(sums_that_are_not_reduced, "adafactor", "dp2", "weights after 3 steps differ in"),
    Trap(columns_of_the_slice, "adafactor", "tp2", "weights after 3 steps differ in"),
    Trap(bits_of_a_tp_rank_s_own_positions, "rounded", "tp2", "weights after 3 steps differ in"),
    Trap(bits_of_a_shard_s_own_positions, "rounded", "dp2", "weights after 3 steps differ in"),
    Trap(rounding_to_the_nearest, "rounded", "dp1", "weights after 3 steps differ in"),
    Trap(stale_shared_weights, "schedule_free_adamw", "dp2,zero3", "loss of step 3"),
]


def last_two(steps: int) -> list[int]:
    """Return the steps after which a run validates: after the first one,
    averaged weights are those of the gradient.
    """
    return [steps - 1, steps]


def run_broken(
    rank: int, world_size: int, broken: Break, config_json: str, steps: int
) -> RankFindings:
    """Run one rank in a framework with one fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshwright.verify.rank, "validated_after", last_two)
        broken(patch)
        return run_layout(rank, world_size, config_json, steps, True)


def problems_of(
    trap: Trap, pool: RankPool, references: References, dtype: str = "float64"
) -> list[str]:
    size, layout = size_for(parse_layout("dp2,tp2")), parse_layout(trap.layout)
    config = with_own(model_config("gpt2", size), trap.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshwright.verify.reference, "validated_after", last_two)
        expected = references.expected(config, size.global_batch, trap.steps, dtype)
    text = layout_config(config, layout, size.global_batch, dtype).model_dump_json()
    found = merge(pool.run(run_broken, layout.size, trap.broken, text, trap.steps))
    return compare(
        trap.layout, found, None, expected.findings, TOLERANCES[dtype], expected.rounding
    ).problems


@mark_all_rows_but("all_layouts", "sums_that_are_not_reduced")
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.broken.__name__)
def test_the_fault_is_seen_and_named(trap: Trap, pool: RankPool, later: References) -> None:
    problems = problems_of(trap, pool, later)
    assert any(trap.said in problem for problem in problems), problems
    assert problems_of(trap._replace(broken=nothing), pool, later) == []


def test_float32_allows_few_moments_rounded_the_other_way_and_no_wrong_bits(
    pool: RankPool, later: References
) -> None:
    """One of 32 such moments is 4e-4 of a bias;
    bits of the wrong positions differ in half of all moments.
    """
    trap = Trap(
        bits_of_a_shard_s_own_positions, "rounded", "dp2", "weights after 3 steps differ in"
    )
    assert any(trap.said in problem for problem in problems_of(trap, pool, later, "float32"))
    assert problems_of(trap._replace(broken=nothing), pool, later, "float32") == []
