"""Time of a step: stages from their layers, the simulated schedule, exposed collectives over dp, the optimizer.

layers   -> StageTime F, B (I, W) of one micro-batch, its message to the next stage
schedule -> Timeline  meshwright.schedule.analysis
step     =  Timeline + exposed gradient reduction and weight all-gather + optimizer
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from meshwright.blueprint import DTYPES, batch_numbers
from meshwright.config import bucket_bytes, reduces_each_microbatch, shard_factor
from meshwright.schedule.action import COMPUTE, Action, Kind, Placement, Schedule
from meshwright.schedule.analysis import Costs, Timeline, bubble_share, pace, simulate
from meshwright.tools.planner.layer_time import LayerTime, layer_time
from meshwright.tools.planner.layout_model import LayoutModel
from meshwright.tools.planner.matrix_step import matrix_step_s
from meshwright.tools.planner.rates import OWN_BYTES, FrameworkTraits, GroupLink, PerformanceModel


class StageTime(NamedTuple):
    """Seconds of one micro-batch of one stage."""

    forward: float
    backward: float
    weight_half: float
    message: float
    """Seconds of the message to the next stage."""
    tp: float
    """Seconds of tensor-parallel messages in forward and backward."""
    cp: float = 0.0
    """Seconds of context-parallel messages in forward and backward."""


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


def step_time(
    layout: LayoutModel,
    performance: PerformanceModel,
    *,
    simulated: bool = True,
    results: dict[Any, Any] | None = None,
) -> StepTime:
    """Return the time of a step for one layout.

    Args:
        simulated: False: the schedule's time by a formula, good enough to rank layouts.
        results: cache of earlier times for the same model.
    """
    hardware, fractions, traits = performance
    pp, tp, replicas = layout.grid.pp, layout.grid.tp, layout.grid.num_replicas
    on_cpu = hardware.kind == "cpu"
    pp_link = performance.group_link(2 if pp > 1 else 1, tp * replicas)
    away = tuple(footprint.offloaded for footprint in layout.footprints)
    key = ("stages", id(hardware), id(layout.layers), tuple(run.start for run in layout.stages), pp_link, away)
    results = {} if results is None else results
    if key not in results:
        results[key] = hardware, _stage_times(layout, performance, pp_link)  # kept alive, so that its id stays its own
    stages: list[StageTime] = results[key][1]
    # ranks that share a core slow each other down
    sharing = max(1.0, replicas * tp / hardware.processors) if on_cpu else 1.0
    if sharing > 1:
        stages = [StageTime(*(seconds * sharing for seconds in stage)) for stage in stages]
    costs, schedule = _costs(stages, traits), layout.schedule
    timeline = Timeline(schedule.name, ())
    if simulated:
        timeline = (simulate if schedule.rows[0][-1:] == (Action(Kind.STEP),) else pace)(schedule, costs)
        pipeline = _pipeline_s(timeline, traits)
        if more_chunks := batch_numbers(layout.config).chunks - schedule.chunks:
            pipeline += more_chunks * seconds_per_micro_batch(timeline, schedule)
    else:
        pipeline = formula_s(layout, costs, traits)
    if on_cpu and pp > 1:  # idle ranks leave their core to others, but the busy ones cannot use more than all cores
        pipeline = max(pipeline, _all_cores_s(layout, stages, replicas * tp / sharing, hardware.processors))
    reduce, gather = _replicas_s(layout, performance, stages)
    optimizer = max(_optimizer_s(layout, performance, rank) for rank in range(schedule.pp)) * sharing
    total = pipeline + (reduce + gather) * sharing + optimizer
    num_nodes = max(layout.grid.size / hardware.devices_per_node, 1.0)
    total = total * (1 + fractions.waits * math.log2(num_nodes)) + fractions.step_s
    bubble = bubble_share(timeline) if simulated else 0.0
    return StepTime(total, pipeline, reduce, gather, optimizer, bubble, timeline, tuple(stages))


def _all_cores_s(layout: LayoutModel, stages: Sequence[StageTime], ranks: float, num_cores: int) -> float:
    """Return the pipeline's seconds if no core is ever idle. ``ranks``: number that run one stage at once."""
    busy = sum(stage.forward + stage.backward + stage.weight_half for stage in stages)
    return float(batch_numbers(layout.config).chunks * busy * ranks / num_cores)


def _stage_times(layout: LayoutModel, performance: PerformanceModel, pp_link: GroupLink) -> list[StageTime]:
    """Return the times of each stage; equal layers are timed once."""
    dtype, tp = layout.config.train.dtype, layout.config.parallel.tp
    cp = max(layout.grid.cp, performance.traits.context)
    tp_link, context_link = performance.group_link(tp, 1), performance.group_link(cp, tp)
    times: dict[int, LayerTime] = {}
    stages = []
    for index in range(len(layout.stages)):
        forward = backward = half = messages = exchange = 0.0
        for layer in layout.stage(index):
            if (key := id(layer.forward)) not in times:
                times[key] = layer_time(layer, performance, dtype, tp_link, context_link)
            forward += times[key].forward
            backward += times[key].backward
            half += times[key].weight_half
            messages += times[key].messages
            exchange += times[key].exchange
        copied_s = layout.footprints[index].offloaded / performance.hardware.host_link.bytes_per_s
        forward, backward = max(forward, copied_s), max(backward, copied_s)  # activation offload, each way
        message_s = _message_s(layout, index, pp_link, tp_link, performance.traits)
        stages.append(StageTime(forward, backward, half, message_s, messages, exchange))
    return stages


@lru_cache(maxsize=1024)
def _by_rank(pp: int, num_stages: int, placement: Placement) -> list[list[int]]:
    stages: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(num_stages):
        stages[placement.pp_rank(stage, pp)].append(stage)
    return stages


def stages_by_rank(schedule: Schedule) -> list[list[int]]:
    """Return the stages of each pipeline rank."""
    return _by_rank(schedule.pp, schedule.num_stages, schedule.placement)


BUBBLES = {"zb_h1": 0.5, "zb_h2": 0.2, "zb_v": 0.2, "v_half": 0.75, "v_min": 1.05}
"""Bubble of schedules that split the backward, as a fraction of 1f1b's; simulated with unequal halves."""


def _costs(stages: Sequence[StageTime], traits: FrameworkTraits) -> list[Costs]:
    """Return the simulation costs of each stage. A blocking message is added to the computation before it."""
    costs = []
    blocking = 0.0 if traits.overlaps_sends else 1.0
    for index, stage in enumerate(stages):
        before = stages[index - 1].message if index else 0.0
        costs.append(
            Costs(
                f=stage.forward + blocking * stage.message,
                b=stage.backward + stage.weight_half + blocking * before,
                i=stage.backward + blocking * before,
                w=stage.weight_half,
                comm=stage.message * (1 - blocking),
            )
        )
    return costs


def seconds_per_micro_batch(timeline: Timeline, schedule: Schedule) -> float:
    """Return the seconds per additional micro-batch: the spacing of the last stage's final backwards."""
    last = schedule.num_stages - 1
    ends = [s.end for s in timeline.spans if s.action.stage == last and s.action.kind in (Kind.B, Kind.I)]
    return (ends[-1] - ends[-1 - schedule.pp]) / schedule.pp


def steady_s(layout: LayoutModel, stages: Sequence[StageTime], traits: FrameworkTraits) -> float:
    """Return the seconds per additional micro-batch: one forward and backward of the slowest rank."""
    costs, schedule = _costs(stages, traits), layout.schedule
    return max(sum(costs[s].f + costs[s].b for s in schedule.stages_of(rank)) for rank in range(schedule.pp))


def _message_s(layout: LayoutModel, stage: int, pp: GroupLink, tp: GroupLink, traits: FrameworkTraits) -> float:
    """Return the seconds of a stage's message to the next stage."""
    sent = layout.footprints[stage].outputs
    if not sent:
        return 0.0
    parallel = layout.config.parallel
    if traits.scatters_sends and parallel.tp > 1 and not parallel.sequence:
        return pp.seconds(sent / parallel.tp, kind="send") + tp.seconds(sent * (parallel.tp - 1) / parallel.tp)
    return pp.seconds(sent, kind="send")


def _pipeline_s(timeline: Timeline, traits: FrameworkTraits) -> float:
    """Return the pipeline's seconds: all ranks together, or the longest span of one rank if steps may overlap."""
    if traits.synchronises_steps:
        return max(span.end for span in timeline.spans)
    own: dict[int, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            start, end = own.get(span.rank, (span.start, span.end))
            own[span.rank] = (min(start, span.start), max(end, span.end))
    return max(end - start for start, end in own.values())


def formula_s(layout: LayoutModel, costs: Sequence[Costs], traits: FrameworkTraits) -> float:
    """Estimate the pipeline's seconds: all micro-batches on the slowest rank, plus bubble and messages."""
    schedule = layout.schedule
    per_rank = [sum(costs[stage].f + costs[stage].b for stage in own) for own in stages_by_rank(schedule)]
    messages = 2 * sum(cost.comm for cost in costs[:-1])
    if not traits.synchronises_steps:
        return schedule.chunks * max(per_rank)
    bubble = (sum(per_rank) - max(per_rank)) * BUBBLES.get(schedule.name, 1 / schedule.interleave)
    return schedule.chunks * max(per_rank) + bubble + messages


def _replicas_s(layout: LayoutModel, performance: PerformanceModel, stages: Sequence[StageTime]) -> tuple[float, float]:
    """Return the exposed seconds of gradient reduction and of weight all-gathers, on the slowest rank."""
    if layout.grid.num_replicas == 1:
        return 0.0, 0.0
    by_rank = stages_by_rank(layout.schedule)
    fullest = max(by_rank, key=lambda own: sum(layout.elements[stage].trained for stage in own))
    candidates = [_replica_s(layout, performance, stages, own) for own in (by_rank[0], by_rank[-1], fullest)]
    return max(candidates, key=sum)


def _replica_s(
    layout: LayoutModel, performance: PerformanceModel, stages: Sequence[StageTime], own: Sequence[int]
) -> tuple[float, float]:
    """Return the exposed seconds of gradient reduction and of weight all-gathers, on a rank with the stages ``own``."""
    config, tp, traits = layout.config, layout.grid.tp, performance.traits
    replicas = layout.grid.num_replicas
    shards = shard_factor(config)
    weight_bytes, gradient_bytes = DTYPES[config.train.dtype].itemsize, traits.wide_gradient_bytes
    if weight_bytes != 2:
        gradient_bytes = max(gradient_bytes, weight_bytes)
    near = performance.group_link(shards, tp)
    far = performance.group_link(replicas // shards, tp * shards)
    ring, across = (shards - 1) / shards, 2 * (replicas // shards - 1) / (replicas // shards)
    elements = sum(layout.elements[stage].trained for stage in own)

    def reduce_scatter_s(calls: int) -> float:
        return near.seconds(elements * gradient_bytes * ring, calls, "reduce_scatter")

    def all_reduce_s(calls: int) -> float:
        return far.seconds(elements * gradient_bytes / shards * across, calls, "all_reduce")

    def all_gather_s(calls: int) -> float:
        return near.seconds(elements * weight_bytes * ring, calls, "all_gather")

    def exposed_s(seconds: float, compute_s: float, overlaps: bool) -> float:
        hidden = performance.fractions.hidden
        return max(seconds - hidden * compute_s, (1 - hidden) * min(seconds, compute_s)) if overlaps else seconds

    forward_s = sum(stages[stage].forward for stage in own)
    backward_s = sum(stages[stage].backward + stages[stage].weight_half for stage in own)
    chunks = batch_numbers(config).chunks
    if config.parallel.zero == 3:
        layers = sum(len(layout.stages[stage]) for stage in own)
        copy_s, add_s = _host_shards_s(layout, performance, elements / shards)
        sums = reduce_scatter_s(layers) + (all_reduce_s(layers) if replicas > shards else 0.0)
        in_forward = max(all_gather_s(layers), copy_s)
        in_backward = in_forward + sums
        reduce = chunks * (exposed_s(in_backward, backward_s, traits.overlaps_reduce) + add_s)
        return reduce, chunks * exposed_s(in_forward, forward_s, traits.overlaps_gather)
    calls = max(1, math.ceil(elements * gradient_bytes / bucket_bytes(config)))
    sums = reduce_scatter_s(calls) + all_reduce_s(calls)
    times = chunks if reduces_each_microbatch(config) else 1
    reduce = times * exposed_s(sums, backward_s, traits.overlaps_reduce)
    gathers = all_gather_s(calls) if shards > 1 else 0.0
    return reduce, exposed_s(gathers, forward_s, traits.overlaps_gather)


def _host_shards_s(layout: LayoutModel, performance: PerformanceModel, shard: float) -> tuple[float, float]:
    """Return the seconds of one copy of float32 shards over the host link, and of a sum of gradients on the host.

    ZeRO-3 with offload copies each shard (``shard`` elements) to the device for forward, again for backward, and its
    gradient back: in each micro-batch. The link carries both directions at once. The host then adds the gradients.
    """
    hardware = performance.hardware
    if not layout.config.parallel.offload or hardware.kind == "cpu":
        return 0.0, 0.0
    copy_s = shard * 4.0 / hardware.host_link.bytes_per_s
    return copy_s, shard * 12.0 * hardware.devices_per_node / hardware.host_memory_bytes_per_s


def _optimizer_s(layout: LayoutModel, performance: PerformanceModel, rank: int) -> float:
    """Return the seconds to read and write a shard's gradient, weights and optimizer state, and to clear gradients.

    With Muon, its exchange and products come on top.
    """
    config, hardware, traits = layout.config, performance.hardware, performance.traits
    trained = sum(layout.elements[stage].trained for stage in layout.schedule.stages_of(rank))
    shards = shard_factor(config)
    per_element = traits.optimizer_bytes + OWN_BYTES.get(config.optimizer.name, 0.0)
    cleared = 0 if config.parallel.zero == 3 else traits.wide_gradient_bytes
    memory, is_on_host = performance.memory_bytes_per_s, config.parallel.offload and hardware.kind != "cpu"
    host = hardware.host_memory_bytes_per_s / hardware.devices_per_node if is_on_host else memory
    seconds = trained / shards * per_element / host + trained * cleared / memory
    if is_on_host and config.parallel.zero != 3:  # gradients to the host, weights back
        seconds += trained / shards * 6.0 / hardware.host_link.bytes_per_s
    return float(seconds) + matrix_step_s(config, layout.matrices_of(rank), performance)
