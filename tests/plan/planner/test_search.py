"""The layouts that are found: they can be run, fit, and none that was left out is better;
the others say why not.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, load, resolve, to_toml
from meshwright.errors import ConfigError
from meshwright.schedule.analysis import peak_activations
from meshwright_plan.planner.choice import Choice, Rejection, choice_of, with_choice
from meshwright_plan.planner.choices import SCHEDULES, choices, divisors
from meshwright_plan.planner.estimates import (
    compute_schedule,
    estimate_bytes,
    estimate_s,
    in_flight,
    lowered_schedule,
)
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.memory.reduction import NCCL
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import Plan, RankedLayout, evaluate, usable_bytes
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.search import search
from meshwright_plan.planner.text import chosen_config, describe
from tests.plan.planner.small import OPTIONS, cache, hardware
from tests.support.errors import has_code
from tests.support.marks import long_row, mark_all_rows_but

KINDS = {
    "llama": ("meshwright_models.llama:build", {}),
    "tied gpt2": ("meshwright_models.gpt2:build", {}),
    "t5": ("meshwright_models.t5:build", {"num_layers": 1}),
    "plain": ("tests.support.builders:plain", {}),
    "carrying": ("tests.support.builders:carrying", {}),
    "frozen": ("tests.support.builders:frozen", {}),
}


def found(
    kind: str = "llama",
    samples: int = 4,
    devices: int = 2,
    nodes: int = 1,
    best: int = 10,
    **box: int,
) -> tuple[ModelCache, Plan]:
    """A small search."""
    builder, options = KINDS[kind]
    bench = cache(builder, samples, **options)
    return bench, search(bench, hardware(devices_per_node=devices, **box), nodes, best=best)


@mark_all_rows_but("long", "frozen")
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_that_is_offered_can_be_run(kind: str) -> None:
    bench, plan = found(kind, 2 if kind == "t5" else 4)
    assert plan.best
    times = [each.time.total for each in plan.best]
    assert times == sorted(times)
    for each in plan.best:
        assert each.choice.pp * each.choice.dp * each.choice.tp == 2
        assert (
            each.choice.micro_batch_size * each.choice.chunks * each.choice.dp
            == bench.config.batch.global_batch
        )
        blueprint = draw_blueprint(resolve(each.config, 2))
        assert blueprint.stages == each.layout.stages
        assert choice_of(each.config) == each.choice
        assert each.peak_bytes <= usable_bytes(plan.hardware)
    chosen = chosen_config(plan, "best")
    assert chosen.launch.processes == "auto"
    assert choice_of(resolve(chosen, 2)) == plan.best[0].choice
    assert "the first beats the second by" in describe(bench, plan)
    if kind == "plain":
        assert {each.choice.tp for each in plan.best} == {1}  # no plan says how to split it


@pytest.mark.parametrize(
    "section",
    [
        {"parallel": {"offload": True, "offload_directory": "fast"}},
        {"pipeline": {"recompute": "full", "recompute_layers": ["block0"]}},
    ],
)
def test_a_chosen_layout_keeps_no_key_of_another(
    section: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    """What `plan --out` writes is a configuration that `train` takes."""
    bench = cache()
    base = bench.config.replace(**section)
    offered = [
        each for each in choices(bench, hardware(devices_per_node=2), 1) if isinstance(each, Choice)
    ]
    plain = next(each for each in offered if each.recompute == "none")
    for choice in (plain, plain._replace(offload=True)):
        file = tmp_path / "plan.toml"
        file.write_text(to_toml(with_choice(base, choice)))
        assert load(str(file), []).parallel.offload == choice.offload


def test_keys_that_a_layout_sets_anew_rule_none_out() -> None:
    """A folder for offload, groups of heads, and GPUs that the configuration names."""
    plain, named = cache(), cache()
    named.config = named.config.replace(
        parallel={"offload": True, "offload_directory": "fast", "cp_head_groups": 2},
        launch={"devices": "0,1", "share_devices": True},
    )
    box = hardware(devices_per_node=2)
    expected = [each for each in choices(plain, box, 1) if isinstance(each, Choice)]
    assert expected == [each for each in choices(named, box, 1) if isinstance(each, Choice)]


@pytest.fixture(scope="module")
def everything() -> tuple[ModelCache, list[RankedLayout]]:
    """Every layout of two devices looked at, whatever it takes:
    time and memory do not depend on the room there is.
    """
    bench, box = cache(), hardware(devices_per_node=2)
    offered = [each for each in choices(bench, box, 1) if isinstance(each, Choice)]
    assert len(offered) == len(set(offered))
    return bench, [
        evaluate(bench, box, with_choice(bench.config, c), c, lowered_schedule(bench, c))
        for c in offered
    ]


@pytest.mark.parametrize("memory_bytes", [long_row(2**30), 750_000, 480_000])
def test_nothing_that_was_left_out_is_better(
    everything: tuple[ModelCache, list[RankedLayout]], memory_bytes: int
) -> None:
    bench, num_evaluated = everything
    box = hardware(memory_bytes, devices_per_node=2)
    plan = search(bench, box, 1, best=3)
    assert plan.num_choices == len(num_evaluated)
    fitting = [each for each in num_evaluated if each.peak_bytes <= usable_bytes(box)]
    assert fitting
    if memory_bytes < 2**30:
        assert len(fitting) < len(num_evaluated)
    assert plan.best[0].time.total == min(each.time.total for each in fitting)


def test_those_that_were_spared_take_part_when_the_last_one_does_not_fit_as_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, box = cache(), hardware(devices_per_node=2)
    one = next(c for c in choices(bench, box, 1) if isinstance(c, Choice) and c.pp == c.dp == 1)
    alike = [c for c in choices(bench, box, 1) if isinstance(c, Choice) and c.shape == one.shape]
    assert {c.recompute for c in alike} == {"none", "pointwise", "selective", "half", "full"}

    def grown(
        of: ModelCache, box: Hardware, config: RunConfig, choice: Choice, *more: Any
    ) -> RankedLayout:
        found = evaluate(of, box, config, choice, *more)
        too_much = 2**40 * (choice.recompute != "full")
        return replace(
            found, memory=tuple(each._replace(messages=too_much) for each in found.memory)
        )

    monkeypatch.setattr("meshwright_plan.planner.search.choices", lambda *_, **__: iter(alike))
    monkeypatch.setattr("meshwright_plan.planner.search.evaluate", grown)
    plan = search(bench, box, 1)
    assert {each.choice.recompute for each in plan.best} == {"full"}
    assert plan.num_fitting == sum(c.recompute == "full" for c in alike)


def test_rejections_carry_the_number_that_breaks_the_rule() -> None:
    _, plan = found(samples=6, devices=4, nodes=2, best=1, memory_bytes=150_000)
    rules = {each.rule for each in plan.rejected}
    assert "global batch 6 is not a multiple of dp 4 (nearest smaller divisor: 3)" in rules
    assert "tp across nodes: tp 8 does not divide the 4 devices of a node" in rules
    assert "pp 8 stages, but 5 layers" in rules
    assert any(
        rule.startswith("memory, ") and "KiB of a device" in rule and "more than the usable" in rule
        for rule in rules
    )
    assert all(each.times > 0 and each.example for each in plan.rejected)
    memory = sum(each.times for each in plan.rejected if each.rule.startswith("memory, "))
    assert plan.num_choices == plan.num_fitting + memory


def test_heads_that_cannot_be_divided_are_named() -> None:
    bench = cache(num_heads=2, num_kv_heads=2)
    rejected = [each for each in choices(bench, hardware(), 1) if isinstance(each, Rejection)]
    assert any(
        "has 2 units" in each.rule and "tp = 4 does not divide 2" in each.rule for each in rejected
    )


def test_tensor_parallelism_never_goes_across_nodes() -> None:
    bench = cache(samples=8)
    offered = [
        each for each in choices(bench, hardware(devices_per_node=3), 2) if isinstance(each, Choice)
    ]
    # 3 would fit a node, but not the heads; 2 and 6 go across
    assert {each.tp for each in offered} == {1}
    offered = [
        each for each in choices(bench, hardware(devices_per_node=2), 2) if isinstance(each, Choice)
    ]
    assert {each.tp for each in offered} == {1, 2}


def test_one_device() -> None:
    _, plan = found(devices=1)
    assert plan.best
    assert {
        (each.choice.pp, each.choice.dp, each.choice.tp, each.choice.zero) for each in plan.best
    } == {(1, 1, 1, 0)}
    assert "pp 1 x dp 1 x tp 1" in str(plan.best[0].choice)


def test_a_prime_batch_leaves_one_replica() -> None:
    _, plan = found(samples=7, devices=2)
    assert {(each.choice.dp, each.choice.micro_batch_size) for each in plan.best} == {(1, 1)}


def test_so_many_samples_that_only_large_micro_batches_are_few_enough() -> None:
    _, plan = found(samples=4096, devices=1, best=3)
    assert plan.best
    assert {each.choice.micro_batch_size for each in plan.best} <= {4, 8, 16, 32, 64}
    assert any(
        "micro-batches in a step (the search stops at" in each.rule for each in plan.rejected
    )


def test_a_tied_weight_counts_once_and_where_it_is_needed() -> None:
    bench = cache("meshwright_models.gpt2:build")
    shared = OPTIONS["vocab_size"] * OPTIONS["hidden_size"]
    # torch counts a shared one once
    parts = sum(parameter.numel() for parameter in bench.model.layers.parameters())
    assert bench.total_elements(1, False).trained == parts
    pp2 = next(
        each for each in choices(bench, hardware(), 1) if isinstance(each, Choice) and each.pp == 2
    )
    stages = bench.layout(with_choice(bench.config, pp2)).elements
    assert sum(stage.trained for stage in stages) == parts + shared  # both ends hold it


def test_what_needs_least_is_named_where_nothing_fits() -> None:
    _, plan = found(memory_bytes=20_000)
    assert not plan.best
    assert plan.closest is not None
    needed, choice = plan.closest
    assert needed > usable_bytes(plan.hardware)
    assert choice.recompute == "full"
    assert choice.zero == 3 or choice.dp == 1


def test_the_host_has_an_end_too() -> None:
    bench = cache()
    roomy, full = (
        search(
            bench,
            hardware(700_000, devices_per_node=2, host_memory_bytes=size),
            1,
            best=3,
            offload=True,
        )
        for size in (2**30, 1000)
    )
    assert roomy.best
    assert all(each.choice.offload for each in roomy.best)
    assert not full.best
    assert any(each.rule.startswith("memory, the optimizer on the host") for each in full.rejected)


def test_a_dtype_that_nobody_has_timed_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16", check=has_code("MW-PLANNER-001")):
        search(cache(), hardware(flops_per_s={"float32": 1e12}), 1)


@pytest.mark.long
def test_what_a_long_pipeline_holds_is_seen_from_short_ones() -> None:
    bench = cache()
    layout = Choice(48, 1, 1, "1f1b", 1, 1, 144, 0, 1, False, "none", False)
    for schedule, interleave in SCHEDULES:
        choice = layout._replace(schedule=schedule, interleave=interleave)
        whole = peak_activations(compute_schedule(bench, choice))
        for rank in (0, 24, 47):
            assert in_flight(bench, choice)[rank] == pytest.approx(whole[rank], rel=0.2, abs=1), (
                schedule,
                rank,
            )


def test_the_ranks_that_are_walked_are_enough() -> None:
    bench = cache(samples=16, num_layers=45)
    for schedule, interleave in SCHEDULES:
        choice = Choice(4, 1, 1, schedule, interleave, 1, 16, 0, 1, False, "none", False)
        layout = bench.layout(with_choice(bench.config, choice), compute_schedule(bench, choice))
        totals = [layout.memory(rank, NCCL).total for rank in range(4)]
        assert max(totals) == max(totals[rank] for rank in layout.unlike_ranks()), (
            schedule,
            totals,
        )


def test_one_cache_serves_several_devices() -> None:
    """The search for a request that works tries other devices with the same model."""
    fast, slow = hardware(), hardware(flops_per_s={"bfloat16": 1e9, "float32": 1e9})
    shared = cache("meshwright_models.llama:build", 4)
    choice = next(each for each in choices(shared, fast, 1) if isinstance(each, Choice))
    times = [estimate_s(shared, PerformanceModel.of(each), choice) for each in (fast, slow)]
    alone = estimate_s(cache("meshwright_models.llama:build", 4), PerformanceModel.of(slow), choice)
    assert times[0] < times[1] == alone


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.long
def test_a_search_runs_few_layers_and_cuts_few_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, which no load changes: of 6,630 layouts. Twice of what they are fails."""
    counts = {"layers run": 0, "footprints": 0, "layouts": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    places = {
        "layers run": "layer_run.LayerRun.profile",
        "footprints": "memory.footprint.footprint",
        "layouts": "model_cache.ModelCache.layout",
    }
    for name, place in places.items():
        path = f"meshwright_plan.planner.{place}"
        monkeypatch.setattr(path, counted(name, pkgutil.resolve_name(path)))
    bench = cache(samples=32, num_layers=30)
    plan = search(bench, hardware(devices_per_node=4), 4)
    assert plan.num_choices > 6000
    most = {"layers run": 160, "footprints": 950, "layouts": 570}
    assert all(0 < counts[name] <= limit for name, limit in most.items()), counts


@pytest.mark.long
def test_estimates_from_a_shared_cache_are_those_of_a_fresh_one() -> None:
    """Layouts share stages and profiles: whatever decides on these has to tell them apart."""
    box, shared = (
        hardware(devices_per_node=4),
        cache(samples=8, num_layers=6).replaced(pins={"cp": 2}),
    )
    performance = PerformanceModel.of(box)
    first = next(c for c in choices(shared, box, 1) if isinstance(c, Choice) and c.pp == 2)
    changed = [
        first,
        first._replace(exchange="heads", order="contiguous"),
        first._replace(exchange="keys", order="contiguous"),
        first._replace(cp=1, dp=2, shard_factor=2),
        first._replace(cp=1, dp=2, shard_factor=2, recompute="full"),
        first._replace(schedule="zb_v", interleave=2),
        first._replace(schedule="interleaved_1f1b", interleave=2),
        first._replace(cp=1, dp=2, shard_factor=2, micro_batch_size=2, chunks=first.chunks // 2),
    ]

    def estimates(of: ModelCache, choice: Choice) -> tuple[float, int]:
        return estimate_s(of, performance, choice), estimate_bytes(of, choice)

    for choice in changed:
        assert estimates(shared, choice) == estimates(cache(samples=8, num_layers=6), choice), (
            choice
        )
    keys, heads = (estimates(shared, choice) for choice in changed[:2])
    assert keys != heads  # orders may tie


@pytest.mark.parametrize(
    ("schedule", "interleave"),
    [long_row("interleaved_1f1b", 2), ("interleaved_1f1b", 4), long_row("zb_v", 2)],
)
def test_logits_are_estimated_for_one_micro_batch_in_flight(schedule: str, interleave: int) -> None:
    """The stage with the loss shares its rank with others, which hold many."""
    bench = cache(samples=32, vocab_size=16384, num_layers=16)
    choice = Choice(4, 1, 1, schedule, interleave, 1, 32, 0, 1, False, "full", False)
    layout = bench.layout(with_choice(bench.config, choice), compute_schedule(bench, choice))
    whole = max(layout.memory(rank, NCCL).total for rank in range(4))
    assert estimate_bytes(bench, choice) == pytest.approx(whole, rel=0.1)
