"""Context parallelism in a plan: bytes of both exchanges, FLOPs of the busiest rank, memory,
and the degrees tried.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.context_parallel.order import ORDERS, documents
from meshwright_launch.pool import RankPool
from meshwright_plan.commands.plans import execution_options
from meshwright_plan.planner import context
from meshwright_plan.planner.choice import Choice, Rejection, choice_of, with_choice
from meshwright_plan.planner.choices import choices
from meshwright_plan.planner.hardware import Link, read_hardware
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.layer_profile import LayerProfile
from meshwright_plan.planner.layer_time import hidden_s, layer_time
from meshwright_plan.planner.memory.reduction import GLOO
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.operations import Work, WorkKind
from meshwright_plan.planner.plan import evaluate
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.search import search
from meshwright_plan.planner.text import describe
from tests.plan.planner.small import LENGTH, OPTIONS, cache, hardware
from tests.support.marks import long_row
from tests.support.processes import larger, measured
from tests.support.seen_keys import keys_seen

HEADS, HEAD_DIM = OPTIONS["num_heads"], OPTIONS["hidden_size"] // OPTIONS["num_heads"]
PAIRS_FLOPS = 2 * 2 * HEAD_DIM  # two products of a query and a key


def choice(cp: int, tp: int = 1, size: int = 1, recompute: str = "none", **context: str) -> Choice:
    """One replica of cp ranks."""
    found = Choice(
        1, 1, tp, "1f1b", 1, size, 8 // size, 1 if cp > 1 else 0, cp, False, recompute, False, cp
    )
    return found._replace(**context)


def block(bench: ModelCache, of: Choice) -> LayerProfile:
    """The second block."""
    found = bench.profiles(with_choice(bench.config, of), splits_backward=False)
    return next(layer for layer in found if layer.name == "block1")


def attention_flops(works: tuple[Work, ...]) -> float:
    return sum(work.flops * work.times for work in works if work.kind is WorkKind.ATTENTION)


def test_the_exchange_of_keys_is_that_of_the_formula() -> None:
    """2 B S G d b (cp-1)/cp each way; recompute of the block gathers once more."""
    for cp, tp, size in ((2, 1, 1), (4, 2, 2)):
        of = block(cache(num_kv_heads=2), choice(cp, tp, size))
        groups = 2 if (cp, tp) == (4, 1) else 1
        expected = 2 * size * LENGTH * (2 // tp) * HEAD_DIM * 2 * (cp - 1) / cp
        (gather,), (scatter,) = (
            [m for m in way if m.axis == "cp"]
            for way in (of.forward_messages, of.backward_messages)
        )
        assert (gather.operation, gather.calls, gather.wire_bytes) == (
            "all_gather",
            groups,
            expected,
        )
        assert (scatter.operation, scatter.calls, scatter.wire_bytes) == (
            "reduce_scatter",
            groups,
            expected,
        )
    again = block(cache(num_kv_heads=2), choice(2, recompute="full")).backward_messages
    assert sorted(message.operation for message in again if message.axis == "cp") == [
        "all_gather",
        "reduce_scatter",
    ]


def test_the_exchange_of_heads_is_that_of_the_formula() -> None:
    """(2 H + 2 G) B S d b / cp x (cp-1)/cp each way."""
    cp, groups = 2, 2
    of = block(cache(num_kv_heads=groups), choice(cp, exchange="heads"))
    expected = (2 * HEADS + 2 * groups) * LENGTH * HEAD_DIM * 2 / cp * (cp - 1) / cp
    for way in (of.forward_messages, of.backward_messages):
        (message,) = [m for m in way if m.axis == "cp"]
        assert (message.operation, message.wire_bytes) == ("all_to_all", expected)


@pytest.mark.parametrize("order", ORDERS)
def test_the_busiest_rank_computes_the_keys_that_its_queries_see(order: str) -> None:
    """Backward computes each block of queries again."""
    bench = cache()
    bench.config = bench.config.replace(data={"document_boundaries": True})
    for cp in (2, 4):
        of, seen = block(bench, choice(cp, order=order)), keys_seen(LENGTH)
        busiest = max(sum(seen[place] for place in places) for places in ORDERS[order](LENGTH, cp))
        assert attention_flops(of.forward) == pytest.approx(PAIRS_FLOPS * HEADS * busiest)
        assert attention_flops(of.backward) == pytest.approx(
            (1 + 2.5) * PAIRS_FLOPS * HEADS * busiest
        )


def test_documents_of_a_corpus_count_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples of a micro-batch add up on each rank before the ranks meet."""
    starts = [[0, 3, 4], [0, 9]]
    samples = [np.isin(np.arange(LENGTH), each) for each in starts]
    monkeypatch.setattr(context, "_documents_of", lambda config: samples)
    bench = cache()
    bench.config = bench.config.replace(data={"document_boundaries": True})
    seen = [keys_seen(LENGTH, each) for each in starts]
    whole = block(bench, choice(1))
    assert attention_flops(whole.forward) == pytest.approx(
        PAIRS_FLOPS * HEADS * sum(map(sum, seen)) / 2
    )
    assert not whole.forward_messages

    ranks = ORDERS["zigzag"](LENGTH, 2)
    loads = [[sum(of[place] for place in places) for places in ranks] for of in seen]
    alone = sum(map(max, loads)) / 2
    together = max(map(sum, zip(*loads, strict=True)))
    assert together < 2 * alone
    assert attention_flops(block(bench, choice(2)).forward) == pytest.approx(
        PAIRS_FLOPS * HEADS * alone
    )
    assert attention_flops(block(bench, choice(2, size=2)).forward) == pytest.approx(
        PAIRS_FLOPS * HEADS * together
    )


def test_an_order_by_documents_is_that_of_each_sample() -> None:
    starts = np.isin(np.arange(512), [0, 300])
    seen = keys_seen(512, [0, 300])
    expected = [sum(seen[place] for place in places) for places in documents(512, 2, [0, 300])]
    assert context.rank_loads("documents", 2, starts).tolist() == expected
    assert context.rank_loads("documents", 2, starts, heads=True).tolist() == [sum(seen) / 2] * 2


def test_a_window_bounds_the_keys() -> None:
    of = block(cache(sliding_window=3), choice(4))
    seen = keys_seen(LENGTH, window=3)
    busiest = max(sum(seen[place] for place in places) for places in ORDERS["zigzag"](LENGTH, 4))
    assert attention_flops(of.forward) == pytest.approx(PAIRS_FLOPS * HEADS * busiest)


def test_tokens_are_a_share_of_all_others() -> None:
    """Products and what is kept shrink with cp,
    but for the keys of all tokens in one group of heads.
    """
    bench, kept = cache(), cache()
    kept.config = kept.config.replace(parallel={"cp_head_groups": 1})
    one, four = (block(bench, choice(cp)) for cp in (1, 4))

    def products(of: LayerProfile) -> float:
        return sum(work.flops * work.times for work in of.forward if work.kind is WorkKind.PRODUCT)

    assert products(four) * 4 == products(one)
    assert (
        four.kept_bytes <= one.kept_bytes / 4 < block(kept, choice(4)).kept_bytes < one.kept_bytes
    )
    labels = [
        layer.forward
        for layer in bench.profiles(with_choice(bench.config, choice(4)), splits_backward=False)
    ]
    assert len(labels) == len(bench.names)


@pytest.mark.parametrize(
    "parallel",
    [
        long_row({"zero": 1}),
        pytest.param({"zero": 3, "tp": 2, "sequence": True}, marks=pytest.mark.torture),
    ],
    ids=str,
)
def test_real_processes_hold_what_was_predicted(pool: RankPool, parallel: dict[str, Any]) -> None:
    base = larger("llama", **parallel | {"tp": 1, "sequence": False})
    config: RunConfig = resolve(
        base.replace(parallel={"cp": 2} | parallel, launch={"processes": "auto"}),
        2 * parallel.get("tp", 1),
    )
    layout = ModelCache(config, ExecutionOptions(fuses_any_attention=False)).layout(config)
    held = max(each.peak_bytes for each in measured(pool, config))
    assert layout.memory(0, GLOO).total == pytest.approx(held, rel=0.03)


def offered(bench: ModelCache, devices: int = 4) -> list[Choice | Rejection]:
    return list(choices(bench, hardware(devices_per_node=devices), 1))


@pytest.mark.long
def test_a_pinned_degree_is_that_of_every_layout() -> None:
    bench = replace(cache(), pins={"cp": 2})
    found = [each for each in offered(bench) if isinstance(each, Choice)]
    assert found and {each.cp for each in found} == {2}
    assert {(each.pp, each.dp, each.tp) for each in found} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    for each in {
        each._replace(recompute="none", micro_batch_size=1, zero=1): each for each in found
    }.values():
        config = with_choice(bench.config, each)
        assert choice_of(config) == each
        assert config.batch.global_batch == bench.config.batch.global_batch
    plan = search(bench, hardware(), 1, best=3)
    text = describe(bench, plan)
    assert "pp  dp  cp  tp" in text
    draw_blueprint(resolve(plan.best[0].config, 4))
    assert plan.best[0].time.stages[0].cp > 0


def test_long_samples_alone_are_shared_without_a_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {each.cp for each in offered(cache()) if isinstance(each, Choice)} == {1}
    monkeypatch.setattr(context, "LEAST_TOKENS", LENGTH // 2)
    found = offered(cache())
    assert {each.cp for each in found if isinstance(each, Choice)} == {1, 2}
    assert {
        each.cp for each in offered(replace(cache(), pins={"cp": 1})) if isinstance(each, Choice)
    } == {1}


def test_a_model_that_cannot_share_its_tokens_says_why() -> None:
    bench = replace(cache("tests.support.builders:plain"), pins={"cp": 2})
    (reason, *_), *others = offered(bench)
    assert not others or all(isinstance(each, Rejection) for each in others)
    assert "needs the attention core in the model's sharding_plan" in reason
    odd = replace(cache(), pins={"cp": 3})
    (refused, *_), *_ = offered(odd, 3)
    assert refused.startswith("samples of 16 tokens cannot be cut into parallel.cp = 3")


def test_what_has_no_effect_without_the_axis_is_left_out() -> None:
    base = cache().config.replace(parallel={"cp_order": "contiguous", "cp_head_groups": 2})
    shared = with_choice(base, choice(2, order="documents")).parallel
    assert (shared.cp_order, shared.cp_exchange, shared.cp_head_groups) == ("documents", "keys", 2)
    alone = with_choice(base, choice(1)).parallel
    assert (alone.cp_order, alone.cp_exchange, alone.cp_head_groups) == ("zigzag", "keys", None)
    assert with_choice(base, choice(2, exchange="heads")).parallel.cp_head_groups is None


@pytest.mark.long
def test_exchanges_and_the_order_of_a_corpus_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads where cp x tp divides them; an order by documents where it saves."""
    whole = [np.isin(np.arange(LENGTH), [0])]
    uneven = [np.isin(np.arange(LENGTH), [0, *range(8, LENGTH)])]
    for samples, order in ((whole, "zigzag"), (uneven, "documents")):
        monkeypatch.setattr(context, "_documents_of", lambda config, samples=samples: samples)
        bench = replace(cache(num_kv_heads=2), pins={"cp": 2})
        bench.config = bench.config.replace(data={"document_boundaries": True})
        found = [each for each in offered(bench) if isinstance(each, Choice)]
        assert {(each.tp, each.exchange, each.order) for each in found} == {
            (1, "keys", order),
            (1, "heads", "zigzag"),
            (2, "keys", order),
        }
        plan = search(bench, hardware(), 1, best=20)
        assert {each.choice.exchange for each in plan.best} == {"keys", "heads"}
        assert "exchange" in describe(bench, plan)


def test_the_exchange_of_a_group_hides_behind_another() -> None:
    """All but one group's, and no longer than attention;
    a rank's processor that sends hides nothing.
    """
    bench = cache()  # as many key-value as query heads: as many groups as ranks
    of = block(bench, choice(4))
    (gather,) = [m for m in of.forward_messages if m.axis == "cp"]
    backward = {m.operation: m.calls for m in of.backward_messages if m.axis == "cp"}
    assert gather.calls == 4 and backward == {"all_gather": 4, "reduce_scatter": 4}
    assert [call.groups for call in of.cores] == [4]
    performance = PerformanceModel.of(hardware())
    assert hidden_s(of.cores, 8.0, 4.0, performance) == pytest.approx(
        performance.fractions.hidden * 0.75 * 4.0
    )
    assert hidden_s(of.cores, 1.0, 4.0, performance) == pytest.approx(
        performance.fractions.hidden * 0.75
    )
    blocking = performance._replace(traits=performance.traits._replace(overlaps_context=False))
    assert hidden_s(of.cores, 1.0, 4.0, blocking) == 0
    one = block(cache(num_kv_heads=1), choice(4))
    assert [call.groups for call in one.cores] == [1] and hidden_s(
        one.cores, 1.0, 4.0, performance
    ) == 0
    link = performance.group_link(4, 1)
    # a layer this small lasts as long as its starts on the host, which are left out here
    measured = [
        each._replace(traits=each.traits._replace(host_operation_s=0.0))
        for each in (performance, blocking)
    ]
    shown, whole = (layer_time(of, each, "bfloat16", link, link) for each in measured)
    assert 0 < shown.exchange < whole.exchange and shown.forward < whole.forward


@pytest.mark.long
def test_the_rank_that_an_h200_ran() -> None:
    """benchmarks/gpu_one_rank.py --job cp8: 1.810 s without communication;
    5.78 s with masks instead of tiles.
    """
    sizes = {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_layers": 8,
        "num_heads": 32,
        "num_kv_heads": 8,
    }
    config = {
        "model": {
            "builder": "meshwright_models.llama:build",
            "options": sizes | {"ffn_size": 14336, "max_sequence_length": 131072},
        },
        "data": {"train": "random", "sequence_length": 131072},
        "batch": {"micro_batch_size": 1, "chunks": 1},
        "parallel": {"cp": 8},
        "train": {"dtype": "bfloat16", "device": "cuda", "compile": False},
    }
    run = resolve(RunConfig.model_validate(config), 8)
    link = Link(bytes_per_s=1e15, latency_s=0)
    h200 = read_hardware("h200").model_copy(update={"node_link": link, "cluster_link": link})
    bench = ModelCache(run, execution_options(run.train, h200))
    predicted = evaluate(bench, h200, run, choice_of(run), draw_blueprint(run).schedule).time.total
    assert predicted == pytest.approx(1.810, rel=0.12)


@pytest.mark.long
def test_an_estimate_does_not_depend_on_those_before() -> None:
    """Positions of the tokens on meta are made with the layers, not by the first profile."""
    others = [choice(2), choice(2, 2), choice(2, recompute="full")]

    def works(bench: ModelCache, of: Choice) -> list[LayerProfile]:
        return list(bench.profiles(with_choice(bench.config, of), splits_backward=False))

    for of in others:
        alone = works(cache(num_kv_heads=2), of)
        for before in others:
            bench = cache(num_kv_heads=2)
            works(bench, before)
            assert works(bench, of) == alone
