"""Predicted time of a step: stages from their layers, the simulated schedule,
exposed dp collectives, the optimizer.

layers   -> StageTime F, B (I, W) of one micro-batch, its message to the next stage
schedule -> Timeline  meshwright.schedule.analysis
step     =  Timeline + exposed gradient reduction and weight all-gather + optimizer
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from meshwright.config import batch_numbers, expert_shard_factor, shard_factor
from meshwright.schedule.action import COMPUTE, Action, Kind, Schedule
from meshwright.schedule.analysis import Costs, Timeline, bubble_share, seconds_in_turns, simulate
from meshwright_plan.planner.experts import AXIS, PAIRED
from meshwright_plan.planner.fast_simulation import simulate_fast
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.layer_time import LayerTime, layer_time
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.links import GroupLink, leaves_node
from meshwright_plan.planner.matrix_step import matrix_step_s
from meshwright_plan.planner.rates import FrameworkTraits, PerformanceModel
from meshwright_plan.planner.replica_time import replicas_s
from meshwright_plan.planner.stage_time import StageTime, stages_by_rank


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
    hidden: float = 0.0
    """Seconds of expert-parallel messages that computation of other micro-batches hides,
    on the rank with most.
    """


def step_time(
    layout: LayoutModel,
    performance: PerformanceModel,
    *,
    simulated: bool = True,
    results: dict[Any, Any] | None = None,
) -> StepTime:
    """Return the time of a step for one layout.

    Args:
        simulated: False takes the schedule's time from a formula (:func:`formula_s`), good enough
            to rank layouts.
        results: cache of earlier times for the same model.
    """
    performance = performance._replace(num_ranks=layout.grid.size)
    hardware, fractions, traits = performance.hardware, performance.fractions, performance.traits
    pp, tp, replicas = layout.grid.pp, layout.grid.tp, layout.grid.num_replicas
    on_cpu = hardware.kind == "cpu"
    away = tuple(footprint.offloaded for footprint in layout.footprints)
    placed = pp, layout.schedule.placement, tp * replicas, layout.config.parallel.sequence
    key = (
        "stages",
        id(hardware),
        id(layout.layers),
        tuple(run.start for run in layout.stages),
        placed,
        away,
    )
    results = {} if results is None else results
    if key not in results:
        # hardware is kept alive: no other gets its id
        results[key] = hardware, stage_times(layout, performance)
    stages: list[StageTime] = results[key][1]
    num_nodes = max(layout.grid.size / hardware.devices_per_node, 1.0)
    sharing = sharing_factor(layout, hardware)
    if sharing > 1:
        stages = [StageTime(*(seconds * sharing for seconds in stage)) for stage in stages]
    costs, schedule = simulation_costs(layout, stages, traits), layout.schedule
    timeline = Timeline(schedule.name, ())
    if simulated:
        timeline = (simulate if schedule.rows[0][-1:] == (Action(Kind.STEP),) else simulate_fast)(
            schedule, costs
        )
        pipeline = _pipeline_s(timeline, traits)
        if more_chunks := batch_numbers(layout.config.batch).chunks - schedule.chunks:
            pipeline += more_chunks * seconds_per_micro_batch(timeline, schedule)
            busiest = max(_busy_s(schedule, costs))
            pipeline = max(pipeline, batch_numbers(layout.config.batch).chunks * busiest)
    else:
        pipeline = formula_s(layout, costs, traits)
    # idle ranks leave their core to others, but the busy ones cannot use more than all cores
    if on_cpu and pp > 1:
        num_cores = hardware.processors * math.ceil(num_nodes)
        pipeline = max(pipeline, _all_cores_s(layout, stages, replicas * tp / sharing, num_cores))
    reduce, gather = replicas_s(layout, performance, stages)
    optimizer = (
        max(_optimizer_s(layout, performance, rank) for rank in _ranks_by_elements(layout))
        * sharing
    )
    total = pipeline + (reduce + gather) * sharing + optimizer
    total = total * waits_factor(layout, performance) + fractions.step_s
    bubble = bubble_share(timeline) if simulated else 0.0
    hidden = (
        _hidden_s(timeline, schedule, costs) * batch_numbers(layout.config.batch).chunks
        if simulated
        else 0.0
    )
    return StepTime(
        total, pipeline, reduce, gather, optimizer, bubble, timeline, tuple(stages), hidden
    )


def waits_factor(layout: LayoutModel, performance: PerformanceModel) -> float:
    """Return the factor of a step's time for ranks that wait for the slowest node."""
    num_nodes = max(layout.grid.size / performance.hardware.devices_per_node, 1.0)
    return 1 + performance.fractions.waits * math.log2(num_nodes)


def sharing_factor(layout: LayoutModel, hardware: Hardware) -> float:
    """Return the factor by which ranks that share a core slow each other down: 1 on GPUs."""
    if hardware.kind != "cpu":
        return 1.0
    on_node = min(layout.grid.num_replicas * layout.grid.tp, hardware.devices_per_node)
    return max(1.0, on_node / hardware.processors)


def _ranks_by_elements(layout: LayoutModel) -> list[int]:
    """Return one pipeline rank per distinct number of parameters;
    all ranks if the optimizer steps whole parameters.
    """
    if layout.config.optimizer.spec.needs_full_weights:
        return list(range(layout.schedule.pp))
    by_rank = stages_by_rank(layout.schedule)
    return list(
        {
            sum(layout.elements[stage].trained for stage in own): rank
            for rank, own in enumerate(by_rank)
        }.values()
    )


def _all_cores_s(
    layout: LayoutModel, stages: Sequence[StageTime], ranks: float, num_cores: int
) -> float:
    """Return the pipeline's seconds if no core is ever idle. ``ranks``:
    ranks of one stage that run at once.
    """
    busy = sum(stage.forward + stage.backward + stage.weight_half for stage in stages)
    return float(batch_numbers(layout.config.batch).chunks * busy * ranks / num_cores)


def stage_times(layout: LayoutModel, performance: PerformanceModel) -> list[StageTime]:
    """Return the times of each stage; equal layers are timed once."""
    dtype, tp = layout.config.train.dtype, layout.config.parallel.tp
    cp = max(layout.grid.cp, performance.traits.context)
    tp_link, context_link = performance.group_link(tp, 1), performance.group_link(cp, tp)
    times: dict[Any, LayerTime] = {}
    sums: dict[Any, tuple[float, ...]] = {}
    stages = []
    for index in range(len(layout.stages)):
        own = [(layer.identity, layer) for layer in layout.stage(index)]
        if (key := tuple(identity for identity, _ in own)) not in sums:
            for identity, layer in own:
                if identity not in times:
                    times[identity] = layer_time(
                        layer, performance, dtype, tp_link, context_link, layout.grid.ep
                    )
            columns = zip(*(times[identity] for identity in key), strict=True)
            sums[key] = tuple([*accumulate(column)][-1] for column in columns)
        forward, backward, half, messages, exchange, rows, dispatched = sums[key]
        copied_s = layout.footprints[index].offloaded / performance.hardware.host_link.bytes_per_s
        # activation offload, each way
        forward, backward = max(forward, copied_s), max(backward, copied_s)
        message_s = _message_s(layout, index, performance, tp_link)
        stages.append(
            StageTime(forward, backward, half, message_s, messages, exchange, rows, dispatched)
        )
    return stages


BUBBLES = {"zb_h1": 0.5, "zb_h2": 0.2, "zb_v": 0.2, "v_half": 0.75, "v_min": 1.05, PAIRED: 0.4}
"""Bubble of schedules that split the backward, as a fraction of 1f1b's;
simulated with unequal halves.
"""


def simulation_costs(
    layout: LayoutModel, stages: Sequence[StageTime], traits: FrameworkTraits
) -> list[Costs]:
    """Return the simulation costs of each stage.
    A blocking message is added to the computation before it.
    """
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
                exchanges=2
                * sum(
                    any(m.axis == AXIS for m in layer.forward_messages)
                    for layer in layout.stage(index)
                ),
                exchange_f=stage.ep_forward,
                exchange_b=stage.ep - stage.ep_forward,
            )
        )
    return costs


def _hidden_s(timeline: Timeline, schedule: Schedule, costs: Sequence[Costs]) -> float:
    """Return the seconds of ep messages that F/B pairs hide, per micro-batch,
    on the rank with most.
    """
    hidden = [
        sum(costs[stage].f + costs[stage].b for stage in own) for own in stages_by_rank(schedule)
    ]
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            hidden[span.rank] -= (span.end - span.start) / schedule.chunks
    return max(hidden) if any(span.beside is not None for span in timeline.spans) else 0.0


def _busy_s(schedule: Schedule, costs: Sequence[Costs]) -> list[float]:
    """Return, per pipeline rank, the seconds of one micro-batch's forward
    and backward through all its stages.
    """
    if schedule.name == PAIRED:
        own = [tuple(costs[stage] for stage in of_rank) for of_rank in stages_by_rank(schedule)]
        return [
            seconds_in_turns(a.parts(Kind.F), b.parts(Kind.B))
            + seconds_in_turns(b.parts(Kind.F), a.parts(Kind.B))
            for a, b in own
        ]
    return [
        sum(costs[stage].f + costs[stage].b for stage in own) for own in stages_by_rank(schedule)
    ]


def seconds_per_micro_batch(timeline: Timeline, schedule: Schedule) -> float:
    """Return the seconds per additional micro-batch:
    the spacing of the last stage's final backwards.
    """
    last = schedule.num_stages - 1
    ends = [
        s.end
        for s in timeline.spans
        if s.action.stage == last and s.action.kind in (Kind.B, Kind.I)
    ]
    return (ends[-1] - ends[-1 - schedule.pp]) / schedule.pp


def steady_s(layout: LayoutModel, stages: Sequence[StageTime], traits: FrameworkTraits) -> float:
    """Return the seconds per additional micro-batch:
    one forward and backward of the slowest rank.
    """
    return max(_busy_s(layout.schedule, simulation_costs(layout, stages, traits)))


def _message_s(
    layout: LayoutModel, stage: int, performance: PerformanceModel, tp: GroupLink
) -> float:
    """Return the seconds of a stage's message to the next stage,
    in the same node or in another one.
    """
    sent, ranks = layout.footprints[stage].outputs, layout.grid.num_replicas * layout.grid.tp
    if not sent:
        return 0.0
    placement, pp_degree = layout.schedule.placement, layout.grid.pp
    source, target = (placement.pp_rank(stage + offset, pp_degree) * ranks for offset in (0, 1))
    if source == target:
        return 0.0
    crosses = leaves_node(source, target, ranks, performance.linked_ranks)
    pp, parallel, traits = (
        performance.send_link(crosses),
        layout.config.parallel,
        performance.traits,
    )
    if traits.scatters_sends and parallel.tp > 1 and not parallel.sequence:
        return pp.seconds(sent / parallel.tp, kind="send") + tp.seconds(
            sent * (parallel.tp - 1) / parallel.tp
        )
    return pp.seconds(sent, kind="send")


def _pipeline_s(timeline: Timeline, traits: FrameworkTraits) -> float:
    """Return the pipeline's seconds: all ranks together,
    or the longest span of one rank if steps may overlap.
    """
    if traits.synchronises_steps:
        return max(span.end for span in timeline.spans)
    own: dict[int, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            start, end = own.get(span.rank, (span.start, span.end))
            own[span.rank] = (min(start, span.start), max(end, span.end))
    return max(end - start for start, end in own.values())


def formula_s(layout: LayoutModel, costs: Sequence[Costs], traits: FrameworkTraits) -> float:
    """Estimate the pipeline's seconds: all micro-batches on the slowest rank,
    plus bubble and messages.
    """
    schedule = layout.schedule
    per_rank = _busy_s(schedule, costs)
    messages = 2 * sum(cost.comm for cost in costs[:-1])
    if not traits.synchronises_steps:
        return schedule.chunks * max(per_rank)
    bubble = (sum(per_rank) - max(per_rank)) * BUBBLES.get(schedule.name, 1 / schedule.interleave)
    return schedule.chunks * max(per_rank) + bubble + messages


def _optimizer_s(layout: LayoutModel, performance: PerformanceModel, rank: int) -> float:
    """Return the seconds to read and write a shard's gradient, weights and optimizer state,
    and to clear gradients.

    An optimizer of matrices adds its exchange of matrices and Newton-Schulz.
    """
    config, hardware, traits = layout.config, performance.hardware, performance.traits
    elements = [layout.elements[stage] for stage in layout.schedule.stages_of(rank)]
    dense, experts = (
        sum(each.dense for each in elements),
        sum(each.of_experts.trained for each in elements),
    )
    stepped = dense / shard_factor(config.parallel) + (
        experts / expert_shard_factor(config.parallel) if experts else 0
    )
    per_element = traits.optimizer_bytes + config.optimizer.spec.extra_traffic
    cleared = 0 if config.parallel.zero == 3 else (dense + experts) * traits.wide_gradient_bytes
    memory, is_on_host = (
        performance.memory_bytes_per_s,
        config.parallel.offload and hardware.kind != "cpu",
    )
    host = hardware.host_memory_bytes_per_s / hardware.devices_per_node if is_on_host else memory
    seconds = stepped * per_element / host + cleared / memory
    if is_on_host and config.parallel.zero != 3:  # gradients to the host, weights back
        seconds += stepped * 6.0 / hardware.host_link.bytes_per_s
    return float(seconds) + matrix_step_s(
        config.parallel,
        config.optimizer,
        config.train,
        layout.matrices_of(rank),
        performance,
    )
