"""Step state: buffers changed once per step by sums over the global batch,
the same in every layout.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import RunConfig
from meshwright.errors import ModelError
from meshwright.model.buffers import StepState, couples_samples, running_buffers
from meshwright.model.build import PlainModel
from meshwright.model.sync_batch_norm import use_replica_statistics
from meshwright.pipeline.plan import check_synchronised
from meshwright.verify import Verification, parse_layout, traits_of
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import merge, run_layout
from meshwright_launch.pool import RankPool
from tests.framework.pipeline.counting import Balanced, LastStepNorm, build
from tests.support.errors import raises
from tests.support.marks import mark_all_rows_but

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
LAYOUTS = ("dp2,pp2,full", "dp2,tp2,sequence,zero3", "pp2,tp2,zb_h1,mbs2", "tp2,sequence,full,mbs2")


def config_of(**sections: Any) -> RunConfig:
    config = RunConfig().replace(
        model={"builder": "tests.framework.pipeline.counting:build", "options": {"vocab_size": 33}},
        data={"sequence_length": 8},
        train={"device": "cpu", "steps": 20},
    )
    return config.replace(**sections) if sections else config


@functools.cache
def proof() -> Verification:
    return Verification(config_of(), global_batch=8, steps=3, random_tokens=True)


@mark_all_rows_but("long", "pp2,tp2,zb_h1,mbs2")
@pytest.mark.parametrize("text", LAYOUTS)
def test_sums_over_the_global_batch_are_those_of_one_process(text: str, pool: RankPool) -> None:
    layout = parse_layout(text)
    row = proof().compare_layout(layout, pool, is_repeated=False)
    assert row.passed, (row.problems, row.failure)
    config = layout_config(config_of(), layout, 8, "float64")
    found = merge(pool.run(run_layout, layout.size, config.model_dump_json(), 3, True))
    expected = proof()._reference(1).findings
    for name in ("balanced0.bias", "balanced1.bias", "balanced1.counts"):
        assert torch.equal(found.weights[name], expected.weights[name]), name
    assert (
        found.weights["balanced0.bias"].abs().sum() > 0
        and found.weights["balanced1.counts"].sum() == 0
    )


@functools.cache
def proof_of_norms() -> Verification:
    builder = "tests.framework.pipeline.counting:build_last_step_norm"
    config = config_of(model={"builder": builder})
    return Verification(config, global_batch=8, steps=3, random_tokens=True)


@mark_all_rows_but("long", "dp2,pp2,mbs2,full")
@pytest.mark.parametrize(
    "text", ["dp2,pp2,mbs2,full", "dp4,mbs1,zero3", "mbs8", "tp2,sequence,mbs4", "pp2,zb_h1"]
)
def test_a_norm_by_the_last_step_has_one_process_at_any_micro_batch_size(
    text: str, pool: RankPool
) -> None:
    """The class is that of docs/models.md."""
    proof = proof_of_norms()
    row = proof.compare_layout(parse_layout(text), pool, is_repeated="full" not in text)
    assert row.passed, (row.problems, row.failure)
    assert not proof.traits.couples_samples
    moved = proof._reference(1).findings.weights["norm1.mean"]
    assert 0 < moved.abs().sum() < float("inf")
    code = inspect.getsource(LastStepNorm).replace(f'    """{LastStepNorm.__doc__}"""\n\n', "")
    assert code in DOCUMENT.read_text()


def test_step_sums_couple_no_samples() -> None:
    layers = build()
    running = running_buffers(layers, torch.zeros((2, 8), dtype=torch.int64, device="meta"))
    assert running == [f"balanced{i}.{name}" for i in (0, 1) for name in ("bias", "counts")]
    assert not couples_samples(layers, running)
    traits = traits_of(config_of())
    assert not traits.has_running and not traits.couples_samples


def replicas(
    momentum: float | None, num_replicas: int, chunks: int
) -> tuple[nn.Module, list[nn.Module]]:
    """Run one BatchNorm over all micro-batches of two steps, and replicas of it over theirs."""
    torch.manual_seed(0)
    batches = torch.randn(2, num_replicas * chunks, 4, 3, dtype=torch.float64)
    plain = nn.BatchNorm1d(3, momentum=momentum).double()
    models = [
        nn.Sequential(nn.BatchNorm1d(3, momentum=momentum).double()) for _ in range(num_replicas)
    ]
    names = [f"0.{name}" for name, _ in plain.named_buffers()]
    states = [
        StepState(model, names, ["0"], (d, num_replicas), True) for d, model in enumerate(models)
    ]
    for step in batches:
        for batch in step:
            plain(batch)
        for d, (state, model) in enumerate(zip(states, models, strict=True)):
            state.begin(1.0)
            for batch in step[d * chunks : (d + 1) * chunks]:
                model(batch)
        total = torch.stack([state.vector(torch.device("cpu")) for state in states]).sum(0)
        for state in states:
            assert state.split_off(torch.cat([torch.ones(3), total])).tolist() == [1.0] * 3
            state.end()
    return plain, [model[0] for model in models]


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize(("num_replicas", "chunks"), [(1, 3), (2, 1), (3, 2)])
def test_running_statistics_are_those_of_one_process_in_the_order_of_the_samples(
    momentum: float | None, num_replicas: int, chunks: int
) -> None:
    plain, models = replicas(momentum, num_replicas, chunks)
    for model in models:
        for (name, expected), (_, found) in zip(
            plain.named_buffers(), model.named_buffers(), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13, msg=name)


def test_a_skipped_step_leaves_no_trace() -> None:
    model = build()
    names = ["balanced0.bias", "balanced0.counts"]
    state = StepState(model, names, [name for name, _ in model.named_children()], (0, 1), True)
    state.begin(1.0)
    model(torch.zeros((1, 8), dtype=torch.int64))
    assert model.get_buffer("balanced0.counts").sum() == 8
    state.split_off(state.vector(torch.device("cpu")))
    state.undo()
    assert (
        model.get_buffer("balanced0.counts").sum() == 0
        and model.get_buffer("balanced0.bias").sum() == 0
    )


class Nameless(Balanced):
    """Names a sum that does not exist."""

    step_sums = ("counts", "entropy")


class Endless(nn.Module):
    """Has sums and no end of a step."""

    step_sums = ("counts",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.counts += x.detach().sum()
        return x


def refusal(layer: nn.Module, plan: dict[str, str], **parallel: int) -> str:
    from meshwright.model.build import PlainModel
    from meshwright.pipeline.plan import check_running
    from meshwright.schedule.build import build as build_schedule
    from meshwright.schedule.lower import lower

    model = PlainModel(nn.Sequential(layer), plan=plan)
    running = running_buffers(model.layers, torch.empty((2, 4, 8), device="meta"))
    config = config_of(parallel=parallel)
    try:
        check_running(
            config.parallel,
            config.train.dtype,
            model,
            running,
            lower(build_schedule("1f1b", 1, 2)),
            ["0"],
        )
    except ModelError as error:
        return error.message
    return ""


def test_sums_that_cannot_be_taken() -> None:
    assert refusal(Balanced(8, 4), {}, dp=2, tp=2) == ""
    assert "step_sums names entropy, which is no buffer" in refusal(Nameless(8, 4), {})
    assert "it has step_sums and no method end_step()" in refusal(Endless(), {})
    assert "sharding_plan splits 0" in refusal(Balanced(8, 4), {"0": "column"}, tp=2)
    assert refusal(Balanced(8, 4), {"0": "router"}, tp=2) == ""
    statistics = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8))
    assert refusal(statistics, {}, dp=2) == "" and "parallel.cp = 2" in refusal(
        statistics, {}, cp=2
    )


def test_statistics_of_replicas_inside_experts() -> None:
    """Without parameters, whose numbers would not count the experts."""
    model = PlainModel(nn.Sequential(nn.Sequential(nn.SyncBatchNorm(8, affine=False))))
    assert not list(use_replica_statistics("test", model.layers))
    for ep, plan in ((1, {"0": "experts"}), (2, {})):
        model.plan = plan
        check_synchronised(config_of(parallel={"dp": 2, "ep": ep}).parallel, "index", model, [])
    model.plan = {"0": "experts"}
    with raises("MW-PIPELINE-051", "0.0 (SyncBatchNorm)", "parallel.ep = 2"):
        check_synchronised(config_of(parallel={"dp": 2, "ep": 2}).parallel, "index", model, [])
