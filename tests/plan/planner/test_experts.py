"""Expert parallelism in a plan: bytes of the exchange, load of the busiest rank, memory,
and the degrees tried.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import Parallel, RunConfig, resolve
from meshwright.optimizer.at_rest import Elements, held_at_rest
from meshwright_plan.dryrun.job import dry_run_job
from meshwright_plan.planner.choice import Choice, Rejection, choice_of, with_choice
from meshwright_plan.planner.choices import choices
from meshwright_plan.planner.experts import PAIRED, exchange_s
from meshwright_plan.planner.explanation import parts
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.layer_profile import GroupMessages, LayerProfile
from meshwright_plan.planner.load import largest_skew, room_for_skew
from meshwright_plan.planner.memory.reduction import GLOO
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.operations import WorkKind
from meshwright_plan.planner.plan import evaluate, usable_bytes
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.search import search
from meshwright_plan.planner.text import describe
from tests.plan.planner.small import LENGTH, LLAMA, OPTIONS, cache, hardware
from tests.support.marks import long_row
from tests.support.processes import larger

E, K = 4, 2
MOE = {"num_experts": E, "top_k": K}
HIDDEN, FFN = OPTIONS["hidden_size"], LLAMA["ffn_size"]


def mixture(**changed: Any) -> ModelCache:
    """Two blocks of four experts each."""
    return replace(cache(moe=MOE), **changed)


def choice(ep: int, dp: int = 2, tp: int = 1, recompute: str = "none") -> Choice:
    """One micro-batch of a sample per replica."""
    return Choice(1, dp, tp, "1f1b", 1, 1, 8 // dp, 1, dp, tp > 1, recompute, False, 1, ep)


def block(bench: ModelCache, of: Choice) -> LayerProfile:
    """The second block."""
    found = bench.profiles(with_choice(bench.config, of), splits_backward=False)
    return next(layer for layer in found if layer.name == "block1")


def exchanged(
    of: LayerProfile,
) -> tuple[list[tuple[str, int, float]], list[tuple[str, int, float]]]:
    """(operation, calls, bytes) over ep, in forward and in backward."""
    forward, backward = (
        [(m.operation, m.calls, m.wire_bytes) for m in messages if m.axis == "ep"]
        for messages in (of.forward_messages, of.backward_messages)
    )
    return forward, backward


def test_the_exchange_is_that_of_the_formula() -> None:
    """2 k T D b (ep-1)/ep each way, and E x 8 bytes of counts;
    recompute of the block repeats its forward.
    """
    for ep, tp in ((2, 1), (4, 2)):
        of = block(mixture(), choice(ep, tp=tp))
        rows = 2 * K * (LENGTH // tp) * HIDDEN * 2 * (ep - 1) / ep
        counts = E * 8 * (ep - 1) / ep
        assert exchanged(of) == ([("all_to_all", 3, rows + counts)], [("all_to_all", 2, rows)])
    again = block(mixture(), choice(2, recompute="full"))
    rows, counts = K * LENGTH * HIDDEN * 2, E * 8 / 2
    assert exchanged(again)[1] == [("all_to_all", 5, 2 * rows + counts)]
    assert exchanged(block(mixture(), choice(1))) == ([], [])


def test_ranks_with_the_same_tokens_gather_the_results() -> None:
    """Count rows as with sequence parallelism, and an all-gather over tp each way."""
    with_sequence = choice(4, tp=2)
    alike = block(mixture(), with_sequence._replace(sequence=False))
    assert exchanged(alike) == exchanged(block(mixture(), with_sequence))
    gathers = [
        [m.wire_bytes for m in messages if (m.axis, m.operation) == ("tp", "all_gather")]
        for messages in (alike.forward_messages, alike.backward_messages)
    ]
    rows = LENGTH * HIDDEN * 2 / 2
    assert gathers == [[rows], [rows + LENGTH * K * 4 / 2]]


def products(of: LayerProfile) -> float:
    return sum(work.flops * work.times for work in of.forward if work.kind is WorkKind.PRODUCT)


def test_the_busiest_rank_has_skew_times_the_rows() -> None:
    """Its products of experts and its bytes; at most all rows of the group,
    and no more without ep.
    """
    even, more, most = (block(mixture(skew=skew), choice(2)) for skew in (1.0, 1.5, 9.0))
    of_experts = K * LENGTH * 6 * HIDDEN * FFN
    assert products(more) - products(even) == pytest.approx(0.5 * of_experts)
    assert products(most) - products(even) == pytest.approx(of_experts)
    counts = E * 8 / 2
    for way, share in ((0, counts), (1, 0.0)):
        (_, _, even_bytes), (_, _, more_bytes) = exchanged(even)[way][0], exchanged(more)[way][0]
        assert more_bytes - share == 1.5 * (even_bytes - share)
    assert even.kept_bytes < more.kept_bytes < most.kept_bytes
    assert products(block(mixture(skew=1.5), choice(1))) == products(even)


def test_a_capacity_limits_the_load() -> None:
    limited = replace(cache(moe=MOE | {"capacity_factor": 1.5}), skew=2.0)
    expected, even = block(mixture(skew=1.5), choice(2)), block(mixture(skew=1.0), choice(2))
    assert exchanged(block(limited, choice(2))) == exchanged(expected) != exchanged(even)
    assert limited.load_limit == 1.5 and math.isinf(mixture().load_limit)
    assert cache(moe=MOE | {"capacity_factor": 0.5}).load_limit == 1.0
    bench = replace(limited, pins={"ep": 2, "pp": 1})
    (line,) = room_for_skew(bench, hardware(), search(bench, hardware(), 1, best=1).best[0])
    assert line == "load of the experts: fits up to their capacity, 1.5 times the mean of 2 ranks"


def test_experts_of_a_rank_are_one_product_on_a_gpu() -> None:
    """As many FLOPs as a loop over them."""
    loop, grouped = (
        block(mixture(execution=ExecutionOptions(groups_experts=groups)), choice(2))
        for groups in (False, True)
    )
    assert products(grouped) == products(loop)
    shapes = {
        work.shape
        for works in (grouped.forward, grouped.backward)
        for work in works
        if work.shape[0] == E // 2
    }
    rows = K * LENGTH // (E // 2)
    up, down = (rows, 2 * FFN, HIDDEN), (rows, HIDDEN, FFN)
    of_inputs = {(rows, HIDDEN, 2 * FFN), (rows, FFN, HIDDEN)}
    of_weights = {(HIDDEN, 2 * FFN, rows), (FFN, HIDDEN, rows)}
    assert {shape[1:] for shape in shapes} >= {up, down} | of_inputs
    assert {tuple(sorted(shape[1:])) for shape in shapes} >= {
        tuple(sorted(shape)) for shape in of_weights
    }


def larger_mixture(**parallel: Any) -> RunConfig:
    """Large enough for scalars and padding not to count; the first block is dense."""
    base, size = larger("llama"), parallel["dp"] * parallel.get("tp", 1)
    moe = {
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn_size": 64,
        "shared_ffn_size": 64,
        "first_dense": 1,
    }
    model = {"options": base.model.options | {"moe": moe, "num_layers": 2}}
    return resolve(
        base.replace(
            model=model,
            parallel=parallel,
            batch={"chunks": 2, "global_batch": None},
            launch={"processes": "auto"},
        ),
        size,
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp": 4, "ep": 2, "zero": 2},
        long_row({"dp": 2, "tp": 2, "sequence": True, "ep": 4}),
        long_row({"dp": 2, "tp": 2, "ep": 4}),
        pytest.param({"dp": 4, "ep": 2, "zero": 3}, marks=pytest.mark.torture),
    ],
    ids=str,
)
def test_a_dry_run_counts_what_was_predicted(parallel: dict[str, Any]) -> None:
    """Bytes of the exchange and at rest exactly, but for padding;
    the peak as close as of other layouts.
    """
    config = larger_mixture(**parallel)
    layout = ModelCache(config, ExecutionOptions(fuses_any_attention=False)).layout(config)
    (counted,) = dry_run_job(config).profiles
    group, ep = tuple(range(parallel["ep"])), parallel["ep"]
    calls = [each.call for each in counted.communication if each.call.group == group]
    rows = [call for call in calls if call.operation == "all_to_all"]
    messages = [
        m for layer in layout.layers for m in (*layer.forward_messages, *layer.backward_messages)
    ]
    expected = 2 * sum(message.wire_bytes for message in messages if message.axis == "ep")
    assert sum(call.num_bytes for call in rows) * (ep - 1) / ep == expected
    predicted = layout.memory(0, GLOO)
    for name in ("weights", "gradients", "optimizer"):
        (held,) = (num_bytes for category, num_bytes in counted.at_rest.items() if category == name)
        assert getattr(predicted, name) == pytest.approx(held, rel=1e-3), name
    assert predicted.total == pytest.approx(
        counted.peak_bytes, rel=0.04 if parallel.get("zero") == 3 else 0.01
    )


def test_experts_are_sharded_over_their_own_replicas() -> None:
    """8 replicas of other weights are 2 of each expert with ep 4, which ZeRO-3 shards as well."""
    base = larger("llama").replace(
        parallel={"dp": 8, "ep": 4, "zero": 3}, train={"dtype": "bfloat16"}
    )
    of = Elements(0, 800, 0, experts=Elements(0, 400, 0))

    def held(elements: Elements, parallel: Parallel = base.parallel) -> tuple[int, ...]:
        return held_at_rest(parallel, base.optimizer, base.train.dtype, elements)

    assert held(of) == (400 + 800, 400 + 800, 800 + 2 * 800, 0)
    odd = of._replace(experts=of.of_experts._replace(rows=3))
    assert held(odd) == (400 + 800, 400 + 800, 800 + 3 * 800, 0), "2 shards do not divide 3 experts"
    assert of.trained == 1200 and of.dense == 800
    assert of.divided(4) == Elements(0, 200, 0, experts=Elements(0, 100, 0))
    assert held(of, base.replace(parallel={"ep": 8}).parallel)[2] == 800 + 12 * 400


def test_bytes_to_other_nodes_take_the_network_link() -> None:
    """Of 8 ranks on nodes of 4, 4 of 7 parts leave the node."""
    box = hardware()
    performance, message = PerformanceModel.of(box), GroupMessages("all_to_all", 1, 7e9, "ep")
    near, far = performance.fractions.node_link * 450e9, performance.fractions.cluster_link * 50e9
    assert exchange_s(performance, 8, [message]) == pytest.approx(4e9 / far, rel=1e-3)
    assert exchange_s(performance, 4, [message]) == pytest.approx(7e9 / near, rel=1e-2)
    assert exchange_s(performance, 4, [message._replace(axis="cp")]) == 0.0


def offered(bench: ModelCache, devices: int = 4) -> list[Choice | Rejection]:
    return list(choices(bench, hardware(devices_per_node=devices), 1))


def test_a_search_tries_what_the_rules_allow() -> None:
    found = {
        (each.dp, each.tp, each.ep)
        for each in offered(mixture())
        if isinstance(each, Choice) and each.pp == 1
    }
    assert found == {
        (4, 1, 1),
        (4, 1, 2),
        (4, 1, 4),
        (2, 2, 1),
        (2, 2, 2),
        (2, 2, 4),
        (1, 4, 1),
        (1, 4, 4),
    }
    assert {each.ep for each in offered(cache()) if isinstance(each, Choice)} == {1}
    across = mixture()
    assert 8 not in {each.ep for each in choices(across, hardware(), 2) if isinstance(each, Choice)}
    for each in (
        each for each in offered(mixture()) if isinstance(each, Choice) and each.recompute == "none"
    ):
        assert choice_of(with_choice(across.config, each)) == each


@pytest.mark.parametrize(
    ("bench", "ep", "reason"),
    [
        (mixture(), 3, "parallel.ep = 3 does not divide the number of experts = 4"),
        (cache(), 2, "ep with no experts: the plan names no experts"),
        (mixture(), 2, "parallel.tp = 4 does not divide parallel.ep = 2"),
    ],
)
def test_a_pinned_degree_that_breaks_a_rule_is_named(
    bench: ModelCache, ep: int, reason: str
) -> None:
    rules = [
        each.rule
        for each in offered(replace(bench, pins={"ep": ep}))
        if isinstance(each, Rejection)
    ]
    assert any(rule.startswith(reason) for rule in rules), rules


def test_a_plan_shows_the_degree_and_the_load_that_fits() -> None:
    bench = mixture(pins={"ep": 2, "pp": 1})
    plan = search(bench, hardware(), 1, best=3)
    text = describe(bench, plan)
    first = plan.best[0]
    assert "pp  dp  tp  ep" in text and ", ep 2" in str(first.choice)
    assert (
        "load of the experts: fits even if one of 2 ranks has all rows (2 times the mean)" in text
    )
    draw_blueprint(resolve(first.config, 4))
    assert first.time.stages[0].ep > 0


def test_the_load_that_fits_is_close_to_the_largest() -> None:
    bench = mixture()
    of = choice(4, dp=4)
    config = with_choice(bench.config, of)
    peaks = [
        evaluate(bench.replaced(skew=skew), hardware(), config, of).peak_bytes
        for skew in (1.0, 2.0, 2.2, 4.0)
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[1] < peaks[3]
    box = hardware(memory_bytes=1000)
    room = peaks[1]
    box = box.model_copy(update={"memory_bytes": int(room / (usable_bytes(box) / 1000)) + 2})
    layout = evaluate(bench, box, config, of)
    most = largest_skew(bench, box, layout)
    assert most is not None and 1.8 < most <= 2.05
    (line,) = room_for_skew(bench, box, layout)
    assert line.startswith(
        f"load of the experts: fits until the busiest of 4 ranks has {most:.2f} times the rows"
    )


def test_pairs_hide_a_part_of_the_exchange() -> None:
    """What DualPipeV hides is in no part of the step; the parts add up;
    without ep there is nothing to try it for.
    """
    bench, found = mixture(), {}
    for schedule in ("zb_v", PAIRED):
        of = choice(2)._replace(pp=2, schedule=schedule, interleave=2, chunks=8, micro_batch_size=1)
        config = with_choice(bench.config.replace(batch={"global_batch": 16}), of)
        found[schedule] = evaluate(bench, hardware(), config, of)
        of_step = parts(found[schedule])
        assert sum(of_step.values()) == pytest.approx(found[schedule].time.total)
        assert min(of_step.values()) > -1e-9
    plain, paired = (
        parts(found[schedule])["expert-parallel messages"] for schedule in ("zb_v", PAIRED)
    )
    assert found["zb_v"].time.hidden == 0.0 and found[PAIRED].time.hidden > 0.05 * plain
    assert paired == pytest.approx(plain - found[PAIRED].time.hidden)
    tried = {
        (each.schedule, each.ep > 1)
        for each in offered(mixture())
        if isinstance(each, Choice) and each.pp > 1
    }
    assert (PAIRED, True) in tried and (PAIRED, False) not in tried
