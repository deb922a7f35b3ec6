"""Time of a step: work of each layer on a device, messages on the links, and the simulated schedule.

Work, messages -> seconds by meshwright.tools.planner.rates
stage    -> Costs     F, B (I, W) of one micro-batch, its message to the next stage
schedule -> Timeline  meshwright.schedule.analysis
step     =  Timeline + exposed gradient reduction and weight all-gather + optimizer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from meshwright.blueprint import batch_numbers
from meshwright.config import RunConfig, bucket_bytes, reduces_each_microbatch, shard_factor
from meshwright.schedule.action import COMPUTE, Action, Placement, Schedule
from meshwright.schedule.action import Kind as Does
from meshwright.schedule.analysis import Costs, Timeline, bubble_share, pace, simulate
from meshwright.tools.planner.hardware import Hardware
from meshwright.tools.planner.layout_model import LayoutModel
from meshwright.tools.planner.operations import Work, WorkKind
from meshwright.tools.planner.profile import GroupMessages, LayerProfile
from meshwright.tools.planner.rates import MEASURED, ON_CORES, FrameworkTraits, RateFractions, Wire, wire_of, work_s
from meshwright.tools.summary import Elements


class StageTime(NamedTuple):
    """Seconds of one micro-batch of one stage."""

    forward: float
    backward: float
    weight_half: float
    message: float
    """Seconds of the message to the next stage."""
    tp: float
    """Seconds of tensor-parallel messages in forward and backward."""


class StepTime(NamedTuple):
    """Seconds of one step."""

    total: float
    pipeline: float
    """Seconds of the simulated schedule."""
    reduce: float
    """Seconds of gradient reduction that computation does not hide."""
    gather: float
    """Seconds of weight all-gathers that computation does not hide."""
    optimizer: float
    bubble_share: float
    timeline: Timeline
    stages: tuple[StageTime, ...]


def layer_s(
    layer: LayerProfile,
    hardware: Hardware,
    dtype: str,
    reached: RateFractions,
    tp: Wire,
    habits: FrameworkTraits,
    context: Wire | None = None,
) -> tuple[float, float, float, float]:
    """Return a layer's seconds: (forward, backward, weight half, messages in forward and backward)."""
    narrow = habits.product_dtype if layer.attended and habits.product_dtype in hardware.flops_per_s else ""

    tokens = {work.shape[1] for work in layer.forward if work.kind is WorkKind.PRODUCT}

    def one(work: Work, backward: bool) -> float:
        batch, m, n, k = work.shape
        if habits.tp_in_parts and tp.size > 1 and work.kind is WorkKind.PRODUCT and m in tokens and m % tp.size == 0:
            part = work._replace(
                flops=work.flops / tp.size, bytes=work.bytes / tp.size, shape=(batch, m // tp.size, n, k)
            )
            return tp.size * whole(part, backward)
        return whole(work, backward)

    def whole(work: Work, backward: bool) -> float:
        if narrow and work.kind is WorkKind.PRODUCT:
            batch, m, n, k = work.shape
            cast = 5 * batch * k * (m + n)  # for the largest value, for the cast, and what that writes
            casting = habits.casts * (cast / (hardware.memory_bytes_per_s * reached.memory) + 2 * reached.operation_s)
            return work_s(work, hardware, narrow, reached, backward=backward) / habits.cast_product_speed + casting
        return work_s(work, hardware, dtype, reached, backward=backward, habits=habits)

    def of(works: Sequence[Work], backward: bool) -> float:
        return sum(work.times * one(work, backward) for work in works)

    def said(messages: Sequence[GroupMessages], beside: Mapping[str, float]) -> float:
        seconds = 0.0
        for message in messages:
            takes = tp.seconds(message.wire_bytes, message.calls, message.operation)
            share = min(1.0, beside.get(message.operation, 0.0) / message.calls)
            seconds += takes * (1 - reached.hidden * share)
        return seconds

    forward_beside, backward_beside = beside_products(layer, habits)
    forward_says, backward_says = said(layer.forward_says, forward_beside), said(layer.backward_says, backward_beside)
    if context is not None and context.size > 1:
        once, again = exchanged_s(layer, context, habits)
        forward_says += once
        backward_says += again
    add_bytes = 0 if habits.accumulates_in_product else layer.num_parameters * (2 + 2 * habits.wide_gradient_bytes)
    adds = add_bytes / (hardware.memory_bytes_per_s * reached.memory)
    backward, weight_half = of(layer.backward, True), of(layer.weight_half, True)
    if layer.weight_half:
        weight_half += adds
    else:
        backward += adds
    return of(layer.forward, False) + forward_says, backward + backward_says, weight_half, forward_says + backward_says


def beside_products(layer: LayerProfile, habits: FrameworkTraits) -> tuple[dict[str, float], dict[str, float]]:
    """Count the calls of each collective that products can hide, in forward and in backward.

    For ``tp_beside_weight_gradients``, backward hides as many reductions as forward has, and the all-gathers in excess
    of the reduce-scatters (of inputs that were kept as shards).
    """
    forward = {message.operation: float(message.calls) for message in layer.forward_says}
    backward = {message.operation: float(message.calls) for message in layer.backward_says}
    gathers = forward.get("all_gather", 0.0)
    if habits.tp_beside:
        return forward, backward
    if habits.tp_in_parts:
        return forward, backward | {"reduce_scatter": max(0.0, backward.get("reduce_scatter", 0.0) - gathers)}
    if not habits.tp_beside_weight_gradients:
        return {}, {}
    found = {name: forward.get(name, 0.0) for name in ("all_reduce", "reduce_scatter")}
    found["all_gather"] = max(0.0, backward.get("all_gather", 0.0) - backward.get("reduce_scatter", 0.0))
    return {}, found


def exchanged_s(layer: LayerProfile, context: Wire, habits: FrameworkTraits) -> tuple[float, float]:
    """Return the seconds of context-parallel messages, in forward and in backward."""
    forward = backward = 0.0
    others = context.size - 1
    for queries, keys in layer.attended:
        if habits.context_exchange == "heads":
            bytes_ = (2 * queries + keys) * others / context.size
            forward += context.seconds(bytes_, 4)
            backward += context.seconds(bytes_, 4)
        else:
            forward += context.seconds(keys * others)
            backward += context.seconds(2 * keys * others, 2)
    return forward, backward


def step_time(
    sketch: LayoutModel,
    hardware: Hardware,
    reached: RateFractions | None = None,
    habits: FrameworkTraits | None = None,
    *,
    simulated: bool = True,
    seen: dict[Any, Any] | None = None,
) -> StepTime:
    """Return the time of a step for one layout.

    ``simulated = False``: the schedule's time by a formula, good enough to rank layouts. ``seen``: cache of earlier
    times for the same model and hardware.
    """
    on_cores = hardware.kind == "cpu"
    reached, habits = (
        reached or (MEASURED if on_cores else RateFractions()),
        habits or (ON_CORES if on_cores else FrameworkTraits()),
    )
    config = sketch.config
    parallel = config.parallel
    dp = parallel.dp
    assert isinstance(dp, int)
    tp = wire_of(parallel.tp, 1, hardware, reached)
    context = wire_of(habits.context, parallel.tp, hardware, reached)
    pp = wire_of(2 if parallel.pp > 1 else 1, parallel.tp * dp, hardware, reached)
    key = ("stages", id(sketch.layers), tuple(run.start for run in sketch.stages), pp)
    seen = {} if seen is None else seen
    if key not in seen:
        seen[key] = _stage_times(sketch, hardware, reached, habits, tp, pp, context)
    stages: list[StageTime] = seen[key]
    crowd = max(1.0, dp * parallel.tp / hardware.processors) if on_cores else 1.0
    stages = [StageTime(*(seconds * crowd for seconds in stage)) for stage in stages] if crowd > 1 else stages
    costs = _costs(stages, habits)
    run = simulate if sketch.schedule.rows[0][-1:] == (Action(Does.STEP),) else pace
    timeline = run(sketch.schedule, costs) if simulated else Timeline(sketch.schedule.name, ())
    pipeline = _pipeline_s(timeline, habits) if simulated else formula_s(sketch, costs, habits)
    more = batch_numbers(config).chunks - sketch.schedule.chunks
    if more and simulated:
        pipeline += more * seconds_per_micro_batch(timeline, sketch.schedule)
    if on_cores and parallel.pp > 1:  # idle ranks leave their core to others, who cannot be quicker than all cores
        pipeline = max(pipeline, _all_cores_s(sketch, stages, dp * parallel.tp / crowd, hardware))
    reduce, gather = _replicas(sketch, hardware, reached, habits, stages)
    optimizer = max(
        _optimizer_s(config, sketch.elements, sketch.schedule.stages_of(rank), hardware, reached, habits)
        for rank in range(sketch.schedule.pp)
    )
    optimizer *= crowd
    total = pipeline + (reduce + gather) * crowd + optimizer
    devices = dp * parallel.tp * parallel.pp
    total = total * (1 + reached.waits * math.log2(max(devices / hardware.devices_per_node, 1.0))) + reached.step_s
    bubble = bubble_share(timeline) if simulated else 0.0
    return StepTime(total, pipeline, reduce, gather, optimizer, bubble, timeline, tuple(stages))


def _all_cores_s(sketch: LayoutModel, stages: Sequence[StageTime], ranks: float, hardware: Hardware) -> float:
    """Return the pipeline's seconds if no core is ever idle. ``ranks``: number that run one stage at once."""
    busy = sum(stage.forward + stage.backward + stage.weight_half for stage in stages)
    return float(batch_numbers(sketch.config).chunks * busy * ranks / hardware.processors)


def _stage_times(
    sketch: LayoutModel,
    hardware: Hardware,
    reached: RateFractions,
    habits: FrameworkTraits,
    tp: Wire,
    pp: Wire,
    context: Wire,
) -> list[StageTime]:
    """Return the times of each stage; equal layers are timed once."""
    times: dict[int, tuple[float, float, float, float]] = {}
    stages = []
    for index in range(len(sketch.stages)):
        forward = backward = half = messages = 0.0
        for layer in sketch.stage(index):
            key = id(layer.forward)
            if key not in times:
                times[key] = layer_s(layer, hardware, sketch.config.train.dtype, reached, tp, habits, context)
            forward += times[key][0]
            backward += times[key][1]
            half += times[key][2]
            messages += times[key][3]
        stages.append(StageTime(forward, backward, half, _message_s(sketch, index, pp, tp, habits), messages))
    return stages


@lru_cache(maxsize=1024)
def _by_rank(pp: int, num_stages: int, placement: Placement) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(num_stages):
        found[placement.pp_rank(stage, pp)].append(stage)
    return found


def stages_by_rank(schedule: Schedule) -> list[list[int]]:
    """Return the stages of each pipeline rank."""
    return _by_rank(schedule.pp, schedule.num_stages, schedule.placement)


FILL = {"zb_h1": 0.5, "zb_h2": 0.2, "zb_v": 0.2, "v_half": 0.75, "v_min": 1.05}
"""Bubble of schedules that split the backward, as a fraction of 1f1b's; simulated with unequal halves."""


def _costs(stages: Sequence[StageTime], habits: FrameworkTraits) -> list[Costs]:
    """Return the simulation costs of each stage. A blocking message is added to the computation before it."""
    costs = []
    waits = 0.0 if habits.sends_beside else 1.0
    for index, stage in enumerate(stages):
        before = stages[index - 1].message if index else 0.0
        costs.append(
            Costs(
                f=stage.forward + waits * stage.message,
                b=stage.backward + stage.weight_half + waits * before,
                i=stage.backward + waits * before,
                w=stage.weight_half,
                comm=stage.message * (1 - waits),
            )
        )
    return costs


def seconds_per_micro_batch(timeline: Timeline, schedule: Schedule) -> float:
    """Return the seconds per additional micro-batch: the spacing of the last stage's final backwards."""
    last = schedule.num_stages - 1
    ends = [s.end for s in timeline.spans if s.action.stage == last and s.action.kind in (Does.B, Does.I)]
    return (ends[-1] - ends[-1 - schedule.pp]) / schedule.pp


def steady_s(sketch: LayoutModel, stages: Sequence[StageTime], habits: FrameworkTraits) -> float:
    """Return the seconds per additional micro-batch: one forward and backward of the slowest rank."""
    costs, schedule = _costs(stages, habits), sketch.schedule
    return max(sum(costs[s].f + costs[s].b for s in schedule.stages_of(rank)) for rank in range(schedule.pp))


def _message_s(sketch: LayoutModel, stage: int, pp: Wire, tp: Wire, habits: FrameworkTraits) -> float:
    """Return the seconds of a stage's message to the next stage."""
    sent = sketch.footprints[stage].outputs
    if not sent:
        return 0.0
    config = sketch.config.parallel
    if habits.scatters_sends and config.tp > 1 and not config.sequence:
        return pp.seconds(sent / config.tp, kind="send") + tp.seconds(sent * (config.tp - 1) / config.tp)
    return pp.seconds(sent, kind="send")


def _pipeline_s(timeline: Timeline, habits: FrameworkTraits) -> float:
    """Return the pipeline's seconds: all ranks together, or the longest span of one rank if steps may overlap."""
    if habits.steps_together:
        return max(span.end for span in timeline.spans)
    own: dict[int, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            start, end = own.get(span.rank, (span.start, span.end))
            own[span.rank] = (min(start, span.start), max(end, span.end))
    return max(end - start for start, end in own.values())


def formula_s(sketch: LayoutModel, costs: Sequence[Costs], habits: FrameworkTraits) -> float:
    """Estimate the pipeline's seconds: all micro-batches on the slowest rank, plus bubble and messages."""
    schedule = sketch.schedule
    per_rank = [sum(costs[stage].f + costs[stage].b for stage in own) for own in stages_by_rank(schedule)]
    messages = 2 * sum(cost.comm for cost in costs[:-1])
    if not habits.steps_together:
        return schedule.chunks * max(per_rank)
    fill = (sum(per_rank) - max(per_rank)) * FILL.get(schedule.name, 1 / schedule.interleave)
    return schedule.chunks * max(per_rank) + fill + messages


def _replicas(
    sketch: LayoutModel,
    hardware: Hardware,
    reached: RateFractions,
    habits: FrameworkTraits,
    stages: Sequence[StageTime],
) -> tuple[float, float]:
    """Return the exposed seconds of gradient reduction and of weight all-gathers, on the slowest rank."""
    config = sketch.config
    parallel = config.parallel
    dp, shards = parallel.dp, shard_factor(config)
    assert isinstance(dp, int)
    if dp == 1:
        return 0.0, 0.0
    narrow = {"bfloat16": 2, "float32": 4, "float64": 8}[config.train.dtype]
    wide = max(habits.wide_gradient_bytes, narrow) if config.train.dtype != "bfloat16" else habits.wide_gradient_bytes
    near = wire_of(shards, parallel.tp, hardware, reached)
    far = wire_of(dp // shards, parallel.tp * shards, hardware, reached)
    chunks = batch_numbers(sketch.config).chunks
    worst = (0.0, 0.0)
    by_rank = stages_by_rank(sketch.schedule)
    fullest = max(by_rank, key=lambda own: sum(sketch.elements[stage].trained for stage in own))
    for own in (by_rank[0], by_rank[-1], fullest):
        elements = sum(sketch.elements[stage].trained for stage in own)
        calls = max(1, math.ceil(elements * wide / bucket_bytes(config)))
        ring, across = (shards - 1) / shards, 2 * (dp // shards - 1) / (dp // shards)
        sums = near.seconds(elements * wide * ring, calls, "reduce_scatter")
        sums += far.seconds(elements * wide / shards * across, calls, "all_reduce")
        gathers = near.seconds(elements * narrow * ring, calls, "all_gather") if shards > 1 else 0.0
        one_backward = sum(stages[stage].backward + stages[stage].weight_half for stage in own)
        one_forward = sum(stages[stage].forward for stage in own)
        if parallel.zero == 3:
            layers = sum(len(sketch.stages[stage]) for stage in own)
            once_f = near.seconds(elements * narrow * ring, layers, "all_gather")
            once_b = once_f + near.seconds(elements * wide * ring, layers, "reduce_scatter")
            summed = far.seconds(elements * wide / shards * across, layers, "all_reduce") if dp > shards else 0.0
            reduce = chunks * _left(once_b + summed, one_backward, reached, habits.reduces_beside)
            gather = chunks * _left(once_f, one_forward, reached, habits.gathers_beside)
        else:
            times = chunks if reduces_each_microbatch(config) else 1
            reduce = times * _left(sums, one_backward, reached, habits.reduces_beside)
            gather = _left(gathers, one_forward, reached, habits.gathers_beside)
        if reduce + gather > sum(worst):
            worst = (reduce, gather)
    return worst


def _left(seconds: float, beside: float, reached: RateFractions, hides: bool) -> float:
    """Return the seconds of a message that ``beside`` seconds of computation do not hide."""
    if not hides:
        return seconds
    return max(seconds - reached.hidden * beside, (1 - reached.hidden) * min(seconds, beside))


def _optimizer_s(
    config: RunConfig,
    elements: Sequence[Elements],
    stages: Sequence[int],
    hardware: Hardware,
    reached: RateFractions,
    habits: FrameworkTraits,
) -> float:
    """Return the seconds to read and write a shard's gradient, weights and optimizer state, and to clear gradients."""
    trained = sum(elements[stage].trained for stage in stages)
    shards = shard_factor(config)
    per_element = habits.optimizer_bytes - (8.0 if config.optimizer.name == "sgd" else 0.0)
    cleared = 0 if config.parallel.zero == 3 else habits.wide_gradient_bytes
    num_bytes = trained / shards * per_element + trained * cleared
    seconds = num_bytes / (hardware.memory_bytes_per_s * reached.memory)
    if config.parallel.offload:
        seconds += trained / shards * 6.0 / hardware.host_link.bytes_per_s
    return float(seconds)
