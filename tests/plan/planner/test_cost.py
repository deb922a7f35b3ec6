"""The time of a step: formulas against cases that can be worked out by hand,
and what more of a rate must do.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshwright.config import Batch, Data, Model, Parallel, Pipeline, RunConfig, Train
from meshwright_plan.planner.cost import StepTime, step_time
from meshwright_plan.planner.hardware import Hardware, Link, known, read_hardware
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.layer_profile import GroupMessages, LayerProfile
from meshwright_plan.planner.layer_time import (
    _WorkTimer,
    context_exchange_s,
    layer_time,
    overlapped_calls,
)
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.links import GroupLink
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.operations import Work, WorkKind
from meshwright_plan.planner.rates import FrameworkTraits, PerformanceModel, RateFractions

IDEAL = RateFractions(
    product=1.0,
    short_k=0.0,
    tiling=0.0,
    memory=1.0,
    attention=1.0,
    attention_backward=1.0,
    last_wave=0.0,
    node_link=1.0,
    cluster_link=1.0,
    message_s=0.0,
    operation_s=0.0,
    hidden=1.0,
    waits=0.0,
)
DEVICE = Hardware(
    name="round numbers",
    devices_per_node=8,
    memory_bytes=10**12,
    processors=100,
    memory_bytes_per_s=1e12,
    flops_per_s={"bfloat16": 1e14, "float8": 2e14},
    attention_share=0.5,
    node_link=Link(bytes_per_s=1e11, latency_s=1e-6),
    cluster_link=Link(bytes_per_s=1e10, latency_s=1e-5),
)

IDEAL_DEVICE = PerformanceModel(DEVICE, IDEAL)


def config(**changes: Any) -> RunConfig:
    """A small model of four blocks."""
    parallel: dict[str, Any] = {"dp": 1, "pp": 1, "tp": 1, "zero": 1} | changes.pop("parallel", {})
    pipeline: dict[str, Any] = changes.pop("pipeline", {})
    chunks = changes.pop("chunks", 4)
    options = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_layers": 4,
        "num_heads": 8,
        "dropout": 0.0,
        "tied": False,
    }
    return RunConfig(
        model=Model(
            builder="meshwright_models.gpt2:build", options=options | {"max_sequence_length": 512}
        ),
        data=Data(train="x", sequence_length=512),
        batch=Batch(micro_batch_size=2, chunks=chunks, global_batch=2 * chunks * parallel["dp"]),
        parallel=Parallel(**parallel),
        pipeline=Pipeline(**pipeline),
        train=Train(dtype="bfloat16", device="cuda"),
    )


def layout(of: RunConfig, execution: ExecutionOptions | None = None) -> LayoutModel:
    return ModelCache(of, execution or ExecutionOptions(fused=True)).layout(of)


def took(
    of: RunConfig,
    hardware: Hardware = DEVICE,
    traits: FrameworkTraits | None = None,
    **fractions: float,
) -> StepTime:
    performance = PerformanceModel(
        hardware, RateFractions()._replace(**fractions), traits or FrameworkTraits()
    )
    return step_time(layout(of), performance)


def test_messages_that_were_measured_count_as_measured() -> None:
    links = {
        "all_reduce": Link(bytes_per_s=1e9, latency_s=1e-3),
        "send": Link(bytes_per_s=2e9, latency_s=5e-4),
    }
    wire = PerformanceModel(DEVICE.model_copy(update={"messages": links}), IDEAL).group_link(4, 1)
    assert wire.seconds(1e9, 2, "all_reduce") == pytest.approx(1 + 2 * 6e-3)
    assert wire.seconds(1e9, 2, "send") == pytest.approx(0.5 + 2 * 5e-4)
    assert wire.seconds(1e9, 2, "all_gather") == IDEAL_DEVICE.group_link(4, 1).seconds(
        1e9, 2, "all_gather"
    )


def test_a_large_product_goes_at_the_peak_and_a_small_one_at_the_memory() -> None:
    large = Work(WorkKind.PRODUCT, 2.0 * 12800**3, 3.0 * 2 * 12800**2, (1, 12800, 12800, 12800))
    assert IDEAL_DEVICE.work_s(large, "bfloat16", backward=False) == pytest.approx(
        2 * 12800**3 / 1e14
    )
    small = Work(WorkKind.PRODUCT, 2.0 * 128 * 128, 1e9, (1, 128, 128, 1))
    assert IDEAL_DEVICE.work_s(small, "bfloat16", backward=False) == pytest.approx(1e-3)


def test_a_wave_that_leaves_processors_idle_is_lost_as_far_as_tiling_says() -> None:
    full = PerformanceModel(DEVICE, IDEAL._replace(tiling=1.0)).product_share((100, 128, 128, 1000))
    more = PerformanceModel(DEVICE, IDEAL._replace(tiling=1.0)).product_share((101, 128, 128, 1000))
    assert full == pytest.approx(1.0)
    assert more == pytest.approx(101 / 200)
    assert IDEAL_DEVICE.product_share((101, 128, 128, 1000)) == pytest.approx(1.0)
    # half of each tile is empty
    assert IDEAL_DEVICE.product_share((100, 64, 128, 1000)) == pytest.approx(0.5)


def test_a_short_inner_dim_halves_the_rate_where_the_constant_says() -> None:
    assert PerformanceModel(DEVICE, IDEAL._replace(short_k=250.0)).product_share(
        (100, 128, 128, 250)
    ) == pytest.approx(0.5)


def test_attention_goes_at_its_share_and_loses_a_part_of_a_wave() -> None:
    work = Work(WorkKind.ATTENTION, 1e12, 1.0, (100, 128, 128, 64))
    assert IDEAL_DEVICE.work_s(work, "bfloat16", backward=False) == pytest.approx(1e12 / 0.5e14)
    halved = IDEAL._replace(last_wave=1.0)
    assert PerformanceModel(DEVICE, halved).work_s(
        work, "bfloat16", backward=False
    ) == pytest.approx(2e12 / 0.5e14)
    older = PerformanceModel(DEVICE, IDEAL, FrameworkTraits(attention_speed=0.5)).work_s(
        work, "bfloat16", backward=False
    )
    assert older == pytest.approx(2e12 / 0.5e14)


def test_constants_leave_an_attention_that_was_measured_as_it_is() -> None:
    work = Work(WorkKind.ATTENTION, 1e12, 1.0, (100, 128, 128, 64))
    fitted = IDEAL._replace(attention=0.5, attention_backward=0.5)
    measured = DEVICE.model_copy(update={"attention_backward_share": 0.25})
    assert PerformanceModel(DEVICE, fitted).work_s(
        work, "bfloat16", backward=False
    ) == pytest.approx(2e12 / 0.5e14)
    assert PerformanceModel(DEVICE, fitted).work_s(
        work, "bfloat16", backward=True
    ) == pytest.approx(4e12 / 0.5e14)
    assert PerformanceModel(measured, fitted).work_s(
        work, "bfloat16", backward=False
    ) == pytest.approx(1e12 / 0.5e14)
    assert PerformanceModel(measured, fitted).work_s(
        work, "bfloat16", backward=True
    ) == pytest.approx(1e12 / 0.25e14)


@pytest.mark.parametrize(
    ("head_dim", "made_for"), [(64, 64), (80, 96), (128, 128), (200, 224), (256, 256), (512, 512)]
)
def test_attention_takes_the_time_of_the_head_dim_that_its_kernel_is_made_for(
    head_dim: int, made_for: int
) -> None:
    def seconds(dim: int) -> float:
        work = Work(WorkKind.ATTENTION, dim * 1e10, 1.0, (100, 128, 128, dim))
        return IDEAL_DEVICE.work_s(work, "bfloat16", backward=False)

    assert seconds(head_dim) == pytest.approx(seconds(made_for))
    older = FrameworkTraits(attention_head_dims=(64, 128))
    work = Work(WorkKind.ATTENTION, 8e11, 1.0, (100, 128, 128, 80))
    assert PerformanceModel(DEVICE, IDEAL, older).work_s(
        work, "bfloat16", backward=False
    ) == pytest.approx(seconds(128))


def test_messages_within_a_node_across_nodes_and_on_several_ways_out() -> None:
    assert IDEAL_DEVICE.group_link(8, 1).seconds(1e11, 0) == pytest.approx(1.0)
    assert IDEAL_DEVICE.group_link(4, 8).seconds(1e10, 0) == pytest.approx(1.0)
    # 8 ways out of a node
    assert IDEAL_DEVICE.group_link(16, 1).seconds(8e10, 0) == pytest.approx(1.0)
    ring = IDEAL_DEVICE.group_link(16, 1)
    assert ring.seconds(0, 1) == pytest.approx(2 * 1e-5 + 14 * 1e-6)
    assert ring.seconds(0, 1, "all_reduce") > ring.seconds(0, 1)
    many = IDEAL_DEVICE.group_link(1024, 1)
    assert many.seconds(0, 1, "all_reduce") < many.seconds(0, 1)  # a tree
    assert IDEAL_DEVICE.group_link(1, 1).seconds(1e12, 5) == 0.0


def test_a_domain_links_several_nodes_and_a_message_has_a_link_of_its_own() -> None:
    domain = DEVICE.model_copy(update={"devices_per_domain": 64})
    assert PerformanceModel(domain, IDEAL).group_link(64, 1) == IDEAL_DEVICE.group_link(
        8, 1
    )._replace(size=64, ring_s=pytest.approx(63e-6))
    # the slower of node and ways out
    assert PerformanceModel(domain, IDEAL).group_link(128, 1).bytes_per_s == 1e11
    assert IDEAL_DEVICE.send_link(False) == IDEAL_DEVICE.group_link(2, 1)
    assert IDEAL_DEVICE.send_link(True) == IDEAL_DEVICE.group_link(2, 8)
    measured = {
        "node_send": Link(bytes_per_s=4e10, latency_s=2e-5),
        "cluster_send": Link(bytes_per_s=5e9, latency_s=0),
    }
    sends = PerformanceModel(DEVICE.model_copy(update=measured), IDEAL)
    assert sends.send_link(False).seconds(4e10, 1, "send") == pytest.approx(1.0 + 2e-5)
    assert sends.send_link(True).seconds(5e9, 1, "send") == pytest.approx(1.0)
    assert sends.group_link(8, 1) == IDEAL_DEVICE.group_link(8, 1)


@pytest.mark.parametrize(
    ("schedule", "tp", "crossings"),
    [("1f1b", 1, [0, 1, 0]), ("1f1b", 2, [1, 1, 1]), ("zb_v", 1, [0, 1, 0, 0, 0, 1, 0])],
)
def test_a_message_takes_the_link_between_its_two_ranks(
    schedule: str, tp: int, crossings: list[int]
) -> None:
    """Four pipeline ranks on nodes of two devices; at the turn of a V nothing is sent."""
    box = DEVICE.model_copy(update={"devices_per_node": 2})
    stages = len(crossings) + 1
    balance = [2, 1, 1, 3] if stages == 4 else [1] * 7 + [0]
    balance = balance if stages == 4 else "layers"  # type: ignore[assignment]
    of = config(parallel={"pp": 4, "tp": tp}, pipeline={"balance": balance, "schedule": schedule})
    if stages == 8:
        of = of.replace(model={"options": of.model.options | {"num_layers": 6}})
    found = took(of, box, message_s=0.0)
    messages = [stage.message for stage in found.stages]
    assert messages[-1] == 0
    near, far = (
        PerformanceModel(box, RateFractions(message_s=0.0))
        .send_link(flag)
        .seconds(2 * 512 * 256 * 2, 1, "send")
        for flag in (False, True)
    )
    expected = [far if crosses else near for crosses in crossings]
    if stages == 8:
        expected[3] = 0.0
    assert messages[:-1] == pytest.approx(expected)
    assert far > near


def test_a_layer_takes_at_least_the_time_in_which_the_host_starts_its_operations() -> None:
    product = Work(WorkKind.PRODUCT, 2e9, 1.0, (1, 1000, 1000, 1000), times=3)
    grouped = product._replace(shape=(16, 10, 100, 100), times=1, groups=16)
    fields: dict[str, Any] = {"weight_half": (), "forward_messages": (), "backward_messages": ()}
    fields |= {
        "num_parameters": 0,
        "kept_bytes": 0,
        "inputs_kept": (),
        "outputs": (),
        "forward_peak": 0,
    }
    one = LayerProfile(
        "a", (product, grouped), (grouped,), backward_peak=0, backward_peak_from_outside=0, **fields
    )

    def seconds(**traits: Any) -> tuple[float, float]:
        found = layer_time(
            one, IDEAL_DEVICE._replace(traits=FrameworkTraits(**traits)), "bfloat16", LINK, LINK
        )
        return found.forward, found.backward

    LINK = GroupLink(1e9, 0.0, 1)
    device = seconds()
    assert seconds(host_operation_s=1e-9) == device
    assert seconds(host_operation_s=1.0) == (4.0, 1.0)
    assert seconds(host_operation_s=1.0, starts_each_expert=True) == (19.0, 16.0)


def test_weights_that_are_cast_once_cost_no_cast_in_each_product() -> None:
    m, n, k = 1000, 200, 300
    forward = Work(WorkKind.PRODUCT, 2.0 * m * n * k, 1.0, (1, m, n, k))
    of_weight = Work(WorkKind.PRODUCT, 2.0 * m * n * k, 1.0, (1, n, k, m))
    fields: dict[str, Any] = {"weight_half": (), "forward_messages": (), "backward_messages": ()}
    fields |= {
        "num_parameters": 0,
        "kept_bytes": 0,
        "inputs_kept": (),
        "outputs": (),
        "forward_peak": 0,
    }
    fields |= {"backward_peak": 0, "backward_peak_from_outside": 0, "attended": ((1, 1),)}
    layer = LayerProfile("a", (forward,), (of_weight,), **fields)
    each, once = (
        layer_time(
            layer,
            IDEAL_DEVICE._replace(
                traits=FrameworkTraits(product_dtype="float8", casts=1.0, casts_weights=flag)
            ),
            "bfloat16",
            GroupLink(1e9, 0.0, 1),
            GroupLink(1e9, 0.0, 1),
        )
        for flag in (True, False)
    )
    assert each.forward - once.forward == pytest.approx(5 * n * k / 1e12)
    assert each.backward == once.backward


def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_formula() -> None:
    pp, chunks = 4, 8
    of = config(parallel={"pp": pp}, pipeline={"balance": [2, 1, 1, 3]}, chunks=chunks)
    drawn = layout(of)
    blocks = drawn.layers[1]
    drawn.layers = tuple(blocks for _ in drawn.layers)
    drawn.stages = [range(i, i + 1) for i in range(pp)]
    at_once = DEVICE.model_copy(update={"node_link": Link(bytes_per_s=1e18, latency_s=0)})
    found = step_time(drawn, PerformanceModel(at_once, RateFractions(message_s=0.0)))
    one = found.stages[0].forward + found.stages[0].backward
    assert found.pipeline == pytest.approx((chunks + pp - 1) * one)
    assert found.bubble_share == pytest.approx((pp - 1) / (chunks + pp - 1))
    estimates = step_time(
        drawn, PerformanceModel(at_once, RateFractions(message_s=0.0)), simulated=False
    )
    assert estimates.pipeline == pytest.approx(found.pipeline)


def test_a_send_that_both_wait_for_lengthens_every_micro_batch() -> None:
    chunks = 8
    drawn = layout(config(parallel={"pp": 2}, pipeline={"balance": [3, 4]}, chunks=chunks))
    drawn.layers = tuple(drawn.layers[1] for _ in drawn.layers)
    drawn.stages = [range(0, 1), range(1, 2)]
    waited = step_time(
        drawn, PerformanceModel(DEVICE, traits=FrameworkTraits(overlaps_sends=False))
    )
    stage = waited.stages[0]
    assert stage.message > 0
    once = stage.forward + stage.backward
    assert waited.pipeline == pytest.approx((chunks + 1) * (once + stage.message), rel=1e-6)


def test_own_span_leaves_out_the_wait_for_the_first_micro_batch() -> None:
    of = config(
        parallel={"pp": 4}, pipeline={"schedule": "zb_h2", "balance": [2, 1, 1, 3]}, chunks=16
    )
    assert took(of, traits=FrameworkTraits(synchronises_steps=False)).pipeline < took(of).pipeline


@pytest.mark.parametrize(
    ("field", "slower", "layout"),
    [
        ("memory_bytes_per_s", 0.5e12, {}),
        ("flops_per_s", {"bfloat16": 0.5e14}, {}),
        ("node_link", Link(bytes_per_s=1e10, latency_s=1e-6), {"tp": 4}),
        ("node_link", Link(bytes_per_s=1e11, latency_s=1e-4), {"tp": 4}),
        ("cluster_link", Link(bytes_per_s=1e9, latency_s=1e-5), {"dp": 16}),
    ],
)
def test_a_slower_device_or_link_makes_a_longer_step(
    field: str, slower: Any, layout: dict[str, int]
) -> None:
    of = config(parallel=layout)
    assert took(of, DEVICE.model_copy(update={field: slower})).total > took(of).total


def test_what_runs_beside_computation_costs_less() -> None:
    of = config(parallel={"dp": 16})
    assert took(of, traits=FrameworkTraits(overlaps_reduce=False)).total > took(of).total
    split = config(parallel={"tp": 4})
    alone = took(split, traits=FrameworkTraits(overlaps_tp_with_weight_gradients=False)).total
    assert took(split).total < alone
    assert (
        took(split, traits=FrameworkTraits(overlaps_tp=True)).total
        < took(split, traits=FrameworkTraits(overlaps_tp_with_weight_gradients=True)).total
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_of_products_cut_in_parts_the_gradients_of_inputs_go_out_behind_them(
    recompute: str,
) -> None:
    of = config(parallel={"tp": 4, "sequence": True}, pipeline={"recompute": recompute})
    block = layout(of).layers[1]
    calls = {message.operation: message.calls for message in block.forward_messages}
    assert calls == {"all_gather": 2, "reduce_scatter": 2}
    forward, backward = overlapped_calls(block, FrameworkTraits(splits_tp_products=True))
    all_of_them = {message.operation: message.calls for message in block.backward_messages}
    assert forward == calls
    assert backward == all_of_them | {"reduce_scatter": all_of_them["reduce_scatter"] - 2}
    assert overlapped_calls(block, FrameworkTraits(overlaps_tp=True)) == (forward, all_of_them)
    assert overlapped_calls(block, FrameworkTraits(overlaps_tp_with_weight_gradients=False)) == (
        {},
        {},
    )


def column_and_row(microseconds: float, **other: Any) -> LayerProfile:
    """A layer of width 256: a column to 128 features and a row back, each product 1 us;
    messages of so many us.
    """
    column = Work(WorkKind.PRODUCT, 1e8, 0, (1, 128, 128, 256))
    row = Work(WorkKind.PRODUCT, 1e8, 0, (1, 128, 256, 128))
    # the row's in forward, the column's in backward
    sent = (GroupMessages("all_reduce", 1, microseconds * 1e5),)
    peaks = {
        "kept_bytes": 0,
        "forward_peak": 0,
        "backward_peak": 0,
        "backward_peak_from_outside": 0,
    }
    nothing: dict[str, Any] = {
        "num_parameters": 0,
        "inputs_kept": (),
        "outputs": (),
        "width": 256,
    } | peaks
    fields: dict[str, Any] = {
        "weight_half": (),
        "forward_messages": sent,
        "backward_messages": sent,
    } | nothing
    fields |= {"forward": (column, row), "backward": (column, row, column, row)}
    return LayerProfile("layer", **(fields | other))


@pytest.mark.parametrize(("message", "exposed"), [(0.5, 0.0), (1.0, 0.0), (3.0, 2.0)])
def test_a_column_hides_as_much_of_its_message_as_its_product_takes(
    message: float, exposed: float
) -> None:
    """A row's message blocks in forward; a column's hides behind the weight gradient,
    which takes 1 us.
    """
    tp, alone = GroupLink(1e11, 0.0, 2), GroupLink(1e11, 0.0, 1)

    def microseconds(layer: LayerProfile, **traits: bool) -> tuple[float, ...]:
        performance = PerformanceModel(DEVICE, IDEAL, FrameworkTraits(**traits))
        return tuple(
            1e6 * seconds for seconds in layer_time(layer, performance, "bfloat16", tp, alone)[:4]
        )

    layer = column_and_row(message)
    assert microseconds(layer) == pytest.approx((2 + message, 4 + exposed, 0, message + exposed))
    blocking = (2 + message, 4 + message, 0, 2 * message)
    assert microseconds(layer, overlaps_tp_with_weight_gradients=False) == pytest.approx(blocking)
    halves = column_and_row(message, backward=layer.backward[:2], weight_half=layer.backward[2:])
    # W comes too late
    assert microseconds(halves) == pytest.approx((2 + message, 2 + message, 2, 2 * message))


def test_a_shard_is_gathered_behind_the_input_gradient() -> None:
    """Backward gathers x for the column (3 us, of which dx hides 1) and gy for the row (3 us,
    which block).
    """
    sent = (GroupMessages("all_gather", 2, 6e5), GroupMessages("reduce_scatter", 1, 3e5))
    layer = column_and_row(
        0.0,
        forward_messages=(*sent[1:], GroupMessages("all_gather", 1, 3e5)),
        backward_messages=sent,
    )
    tp, alone = GroupLink(1e11, 0.0, 2), GroupLink(1e11, 0.0, 1)
    time = layer_time(layer, IDEAL_DEVICE, "bfloat16", tp, alone)
    assert time.messages * 1e6 == pytest.approx(6 + 5 + 2)


@pytest.mark.parametrize("options", [{}, {"sequence": True}])
def test_columns_of_a_block_are_found_by_their_width(options: dict[str, bool]) -> None:
    """GPT-2's up and down projections have one shape at tp 4: 256 x 256 of 1024."""
    block = layout(config(parallel={"tp": 4, **options})).layers[1]
    device = DEVICE.model_copy(update={"memory_bytes_per_s": 1e18})
    found = _WorkTimer(block, PerformanceModel(device, IDEAL), "bfloat16", 4).column_seconds()
    # tokens x width x (a quarter of q, k, v; of the feed-forward network)
    columns = 2 * 1024 * 256 * (192 + 256)
    assert found["all_gather"] == pytest.approx(columns / 1e14)
    assert block.width == 256


def test_more_devices_wait_longer_for_the_slowest() -> None:
    one_node, many = config(parallel={"dp": 8, "zero": 0}), config(parallel={"dp": 64, "zero": 0})
    assert took(one_node, waits=0.01).total == pytest.approx(took(one_node, waits=0.0).total)
    assert took(many, waits=0.01).total == pytest.approx(
        took(many, waits=0.0).total * (1 + 0.01 * math.log2(8))
    )


def test_a_sequence_over_several_ranks_does_their_attention_and_exchanges_heads_or_keys() -> None:
    def block(execution: ExecutionOptions) -> LayerProfile:
        return layout(config(), execution).layers[1]

    one, four = block(ExecutionOptions(fused=True)), block(ExecutionOptions(fused=True, context=4))

    def attention(layer: LayerProfile) -> float:
        return sum(
            work.flops * work.times for work in layer.forward if work.kind is WorkKind.ATTENTION
        )

    assert attention(four) == 4 * attention(one)
    tokens, hidden = 2 * 512, 256
    assert one.attended == ((tokens * hidden * 2, 2 * tokens * hidden * 2),)
    wire = PerformanceModel(
        DEVICE.model_copy(update={"node_link": Link(bytes_per_s=1e11, latency_s=0)}), IDEAL
    ).group_link(4, 1)
    heads = context_exchange_s(one, wire, FrameworkTraits(context=4))
    assert heads[0] == pytest.approx(4 * tokens * hidden * 2 * 3 / 4 / 1e11)
    keys = context_exchange_s(one, wire, FrameworkTraits(context=4, context_exchange="keys"))
    assert keys == pytest.approx(
        (2 * tokens * hidden * 2 * 3 / 1e11, 2 * 2 * tokens * hidden * 2 * 3 / 1e11)
    )


def test_kernels_that_keep_their_inputs_only_keep_less() -> None:
    options = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 8,
    }
    model = Model(
        builder="meshwright_models.llama:build",
        options=options | {"ffn_size": 512, "max_sequence_length": 512},
    )
    of = config().model_copy(update={"model": model})
    plain = layout(of, ExecutionOptions(fused=True)).layers[1].kept_bytes
    kernels = (
        layout(of, ExecutionOptions(fused=True, norm_kernel=True, saves_inputs=True))
        .layers[1]
        .kept_bytes
    )
    value = 2 * 512 * 256 * 2
    # norm's output, q k v, their turned q and k, attention's output, x, norm's output, gate and up,
    # their product
    assert kernels == pytest.approx((1 + 3 + 2 + 1 + 1 + 1 + 4 + 2) * value, rel=0.02)
    assert plain > kernels + 2 * value


def test_an_added_gradient_needs_no_room_besides() -> None:
    plain = layout(config(), ExecutionOptions(fused=True)).layers[1]
    added = layout(config(), ExecutionOptions(fused=True, accumulates=True)).layers[1]
    assert added.backward_peak < plain.backward_peak
    assert added.kept_bytes == plain.kept_bytes


@pytest.mark.parametrize("name", known())
def test_no_device_is_thought_to_reach_more_than_any_was_seen_to(name: str) -> None:
    """65 % of the peak of an H100 is more than any published run of a dense model has come to."""
    hardware = read_hardware(name)
    options = {
        "vocab_size": 32000,
        "hidden_size": 8192,
        "num_layers": 8,
        "num_heads": 64,
        "num_kv_heads": 8,
    }
    model = Model(
        builder="meshwright_models.llama:build",
        options=options | {"ffn_size": 28672, "max_sequence_length": 4096},
    )
    of = config(chunks=1).model_copy(
        update={"model": model, "data": Data(train="x", sequence_length=4096)}
    )
    seconds = step_time(layout(of), PerformanceModel.of(hardware)).total
    weights = 8 * (8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 32000 * 8192
    flops = 2 * 4096 * (6 * weights + 12 * 8 * 8192 * 4096)
    assert (
        0.2
        < flops / seconds / hardware.flops_per_s["bfloat16"]
        < (0.65 if name.startswith("h") else 0.8)
    )


def test_nodes_of_cores_share_no_core() -> None:
    """Weak scaling over fast links: as many samples a rank on one node as on four."""
    box = DEVICE.model_copy(update={"kind": "cpu", "devices_per_node": 2, "processors": 2})
    one, four = (took(config(parallel={"dp": dp}), box, message_s=0.0, waits=0.0) for dp in (2, 8))
    assert four.pipeline == pytest.approx(one.pipeline)
    crowded = took(
        config(parallel={"dp": 8}),
        box.model_copy(update={"devices_per_node": 8}),
        message_s=0.0,
        waits=0.0,
    )
    assert crowded.pipeline == pytest.approx(4 * one.pipeline)
