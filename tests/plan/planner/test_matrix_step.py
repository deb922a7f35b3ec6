"""What a plan counts for Muon: bytes at rest and in the step,
and the seconds of exchange and Newton-Schulz.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.config import RunConfig, resolve
from meshwright.config.optimizers import OPTIMIZERS
from meshwright.optimizer.at_rest import held_at_rest
from meshwright.optimizer.matrix import newton_schulz
from meshwright.schedule.action import Kind
from meshwright_plan.dryrun.fake_step import grid_of, profile_rank, share_blueprint
from meshwright_plan.dryrun.job import Job, dry_run_job, matrices_of_rank
from meshwright_plan.dryrun.rank_profile import RankProfile
from meshwright_plan.dryrun.report import flops_of
from meshwright_plan.planner.choice import with_choice
from meshwright_plan.planner.cost import step_time
from meshwright_plan.planner.matrix_step import (
    HolderGroups,
    MatrixHolders,
    MatrixSize,
    count_sizes,
    matrix_step_s,
    newton_schulz_flops,
    newton_schulz_s,
    plan_exchanges,
    temporary_bytes,
)
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.nearest import search_with_offload
from tests.plan.planner.small import cache, config, hardware
from tests.plan.planner.test_cost import IDEAL_DEVICE, layout
from tests.plan.planner.test_cost import config as config_of_cost

LARGE, SMALL = MatrixSize(64, 256, True), MatrixSize(64, 64, False)


def with_muon(of: RunConfig, **sections: Any) -> RunConfig:
    return of.replace(optimizer={"name": "muon"}, **sections)


def muon_cache(**options: Any) -> ModelCache:
    found = cache(**options)
    found.config = with_muon(found.config)
    return found


def test_matrices_of_a_layout() -> None:
    """llama, 32 wide, tp 2: q, k, v and gate, up are matrices of their own;
    only cut ones go over tp.
    """
    parallel = {"dp": 2, "tp": 2, "pp": 1}
    stages = muon_cache().layout(
        with_muon(config(), parallel=parallel, batch={"micro_batch_size": 1, "chunks": 4})
    )
    assert stages.matrices == [
        (
            (MatrixSize(32, 32, True), 2 * 4),  # q, k, v, out
            (MatrixSize(32, 64, True), 2),  # down
            (MatrixSize(64, 32, True), 2 * 2),  # gate and up
        )
    ]
    assert stages.elements[0].matrices * 2 == 2 * (4 * 32 * 32 + 3 * 32 * 64)


def test_equal_layers_with_unlike_declarations_are_not_taken_for_each_other() -> None:
    stages = cache("tests.plan.planner.test_matrix_step:declared")
    stages.config = with_muon(stages.config)
    found = stages.layout(
        with_muon(stages.config, parallel={"dp": 1, "pp": 1, "tp": 1}, batch={"chunks": 8})
    )
    assert found.matrices == [((MatrixSize(16, 32, False), 2), (MatrixSize(32, 32, False), 1))]


def declared() -> nn.Sequential:
    """Three equal linears: two matrices, AdamW's, one matrix."""
    layers = OrderedDict((name, nn.Linear(32, 32)) for name in "abc")
    model: Any = nn.Sequential(
        OrderedDict(embedding=nn.Embedding(96, 32), **layers, head=nn.Linear(32, 96))
    )
    model.matrices = {"a": (16, 16), "b": "adamw"}
    return model  # type: ignore[no-any-return]


def test_homes_are_among_the_ranks_that_hold_parts() -> None:
    stage = count_sizes([LARGE] * 6 + [SMALL] * 3)
    over_dp, over_both = plan_exchanges(
        (stage,), HolderGroups(MatrixHolders(2, 4), MatrixHolders(8, 1), None)
    )
    assert (over_dp.num_holders, over_dp.stride, over_dp.numel) == (2, 4, 3 * 64 * 64)
    assert (over_both.num_holders, over_both.stride, over_both.numel) == (8, 1, 6 * 64 * 256)
    assert set(over_dp.homes) == {((SMALL, 2),), ((SMALL, 1),)}
    assert set(over_both.homes) == {((LARGE, 1),), ()}
    [alone] = plan_exchanges(
        (stage, stage), HolderGroups(MatrixHolders(1, 1), MatrixHolders(1, 1), None)
    )
    assert (alone.num_holders, alone.homes) == (1, (((SMALL, 6), (LARGE, 12)),))


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float16", 4), ("float64", 8)])
def test_temporaries_are_what_is_sent_what_is_at_home_and_the_largest_matrix(
    dtype: str, itemsize: int
) -> None:
    of = with_muon(config(dtype=dtype), parallel={"dp": 2, "tp": 1, "zero": 1})
    stage = count_sizes([LARGE] * 3)
    sent, at_home, iterates = 3 * LARGE.numel // 2, 2 * LARGE.numel, 3 * LARGE.numel + 2 * 64 * 64
    assert temporary_bytes(of.parallel, of.train, [stage]) == itemsize * (sent + at_home + iterates)
    alone = of.replace(parallel={"zero": 0}).parallel
    assert temporary_bytes(alone, of.train, [stage]) == itemsize * (3 * LARGE.numel + iterates)
    assert temporary_bytes(alone, of.train, [()]) == 0


def test_bytes_at_rest_are_half_for_matrices() -> None:
    stages = layout(with_muon(config_of_cost()))
    [elements] = stages.elements
    assert elements.matrices == 4 * 12 * 256**2
    weights, gradients, optimizer, _ = held_at_rest(
        stages.config.parallel, stages.config.optimizer, stages.config.train.dtype, elements
    )
    assert (weights, gradients) == (2 * elements.trained, 4 * elements.trained)
    assert optimizer == 12 * elements.trained - 4 * elements.matrices
    assert stages.config.optimizer.name == "muon"


def test_the_flops_of_the_busiest_home_are_those_that_torch_counts() -> None:
    of = with_muon(config(), parallel={"dp": 2, "tp": 1, "zero": 1})
    with FlopCounterMode(display=False) as counter:
        for sides in ((64, 256), (256, 64), (64, 64)):
            newton_schulz(torch.ones(sides), 5)
    homes = count_sizes([LARGE, LARGE._replace(rows=256, columns=64), SMALL] * 2)
    assert newton_schulz_flops(of.parallel, of.optimizer, [homes]) == counter.get_total_flops()
    assert newton_schulz_flops(of.parallel, of.optimizer, [()]) == 0


def test_a_dry_run_adds_them_to_the_flops_of_its_ranks() -> None:
    def flops(of: RunConfig) -> float:
        return flops_of(Job(of, grid_of(of.parallel), share_blueprint(of).blueprint, [], []), 0)

    of = config().replace(
        parallel={"dp": 2, "tp": 1, "pp": 1, "zero": 1}, batch={"micro_batch_size": 1, "chunks": 4}
    )
    [matrices] = muon_cache().layout(with_muon(of)).matrices
    muon = with_muon(of)
    expected = newton_schulz_flops(muon.parallel, muon.optimizer, [matrices])
    assert flops(muon) - flops(of) == expected > 0


def test_the_seconds_of_the_fullest_home() -> None:
    """Six products of 64 x 64 x 256 for each of five iterations,
    at 1e14 FLOPs and 1e12 bytes a second.
    """
    of = with_muon(config_of_cost(parallel={"dp": 2}))
    iterations = 5 * (4 * 64 * 64 * 256 + 2 * 64**3)
    one = newton_schulz_s(of.optimizer, of.train, LARGE, IDEAL_DEVICE)
    assert one > iterations / 1e14
    more = of.optimizer.model_copy(update={"ns_steps": 10})
    twice = newton_schulz_s(more, of.train, LARGE, IDEAL_DEVICE)
    around = 7 * LARGE.numel * 2 / 1e12
    assert twice - one == pytest.approx(one - around)
    stage = count_sizes([LARGE] * 3)
    messages = (1.5 + 2) * LARGE.numel * 2 / 2 / 1e11 + 2e-6
    shard = 1.5 * LARGE.numel * (OPTIMIZERS["muon"].matrix_traffic + 4) / 1e12
    found = matrix_step_s(of.parallel, of.optimizer, of.train, [stage], IDEAL_DEVICE)
    assert found == pytest.approx(2 * one + messages + shard)


@pytest.mark.long
def test_a_plan_with_muon_never_offloads() -> None:
    small = muon_cache(hidden_size=256, ffn_size=1024)
    needs = search_with_offload(small, hardware(memory_bytes=2**23), 1, 1)
    assert not needs.best and needs.closest is not None and not needs.closest[1].offload
    fits = search_with_offload(small, hardware(), 1, 3)
    assert fits.best
    with_choice(small.config, fits.best[0].choice)


def test_the_step_is_as_much_longer_as_its_exchange() -> None:
    adamw, muon = (
        layout(of)
        for of in (
            config_of_cost(parallel={"dp": 4}),
            with_muon(config_of_cost(parallel={"dp": 4})),
        )
    )
    more = step_time(muon, IDEAL_DEVICE).optimizer - step_time(adamw, IDEAL_DEVICE).optimizer
    config, matrices = muon.config, muon.matrices_of(0)
    expected = matrix_step_s(
        config.parallel, config.optimizer, config.train, matrices, IDEAL_DEVICE
    )
    assert more == pytest.approx(expected) and more > 0


MOE = {"num_experts": 8, "top_k": 2}
UNEVEN = {"dp": 3}
"""Degrees of which another rank than the first is home of more elements."""
LLAMA = {
    "vocab_size": 96,
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
}


def mixture(**parallel: Any) -> RunConfig:
    """A Llama with 8 experts in its block and Muon."""
    tree = {
        "model": {"builder": "meshwright_models.llama:build", "options": LLAMA | {"moe": MOE}},
        "data": {"train": "random", "sequence_length": 16},
        "batch": {"micro_batch_size": 1, "chunks": 1},
        "parallel": {"zero": 1} | parallel,
        "optimizer": {"name": "muon"},
        "train": {"dtype": "float32"},
    }
    return resolve(RunConfig.model_validate(tree))


def in_step(profile: RankProfile) -> int:
    """Return the peak of STEP."""
    return max(
        each.num_bytes
        for each in profile.peaks
        if getattr(each.activity, "kind", None) is Kind.STEP
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp": 2},
        UNEVEN,
        {"dp": 4, "ep": 4},
        {"dp": 2, "tp": 2, "ep": 4, "sequence": True},
        {"dp": 4, "ep": 2},
    ],
    ids=str,
)
def test_plan_and_dry_run_have_the_homes_of_every_rank(parallel: dict[str, Any]) -> None:
    """Holders of an expert's matrices are its own replicas: a plan had divided them by all,
    43 % too little memory.
    """
    config = mixture(**parallel)
    job, ranks = dry_run_job(config), range(grid_of(config.parallel).size)
    found = [profile_rank(config, rank) for rank in ranks]
    steps = [in_step(each) for each in found]
    assert (steps[0] < max(steps)) == (parallel == UNEVEN)
    assert in_step(job.profiles[0]) == max(steps)
    matrices = matrices_of_rank(job.blueprint, 0)
    at_rest = sum(found[0].at_rest.values())
    assert temporary_bytes(config.parallel, config.train, matrices) == pytest.approx(
        max(steps) - at_rest, rel=0.1
    )
