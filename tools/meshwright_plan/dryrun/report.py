"""Report of a dry run: a table by pipeline rank, totals, disagreements, and one figure."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from meshwright.config import batch_numbers
from meshwright.schedule.action import COMPUTE
from meshwright.schedule.analysis import Timeline, bubble_share, simulate
from meshwright.terminal.format import GIB, format_number_of, format_size, format_table
from meshwright_plan.dryrun.agreement import Disagreement
from meshwright_plan.dryrun.groups import GroupViews, axis_of
from meshwright_plan.dryrun.job import Job, matrices_of_rank
from meshwright_plan.dryrun.rank_profile import Category, RankProfile
from meshwright_plan.planner.balance import first_to_last, stage_costs
from meshwright_plan.planner.matrix_step import newton_schulz_flops
from meshwright_plan.planner.mirror import MirrorLinks, mirror_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StepTimeEstimate(NamedTuple):
    """Prediction of a time model for a job."""

    step_s: float
    mfu_share: float
    """Model FLOPs of the step over the FLOPs that all devices could have computed in it."""
    timeline: Timeline
    """Timeline of the pipeline ranks, in seconds."""
    device: str
    memory_bytes: int
    """Memory of a device that is available to tensors."""
    rows: Sequence[str] = ()
    """Lines on rows of unequal work, if the documents of a corpus are known."""
    links: MirrorLinks | None = None
    """Links that a mirror in host memory goes over."""


class WireTraffic(NamedTuple):
    """Bytes that one rank puts on the wire in a step, along one axis."""

    inside: float
    """Bytes to ranks of the same node."""
    between: float


def wire_bytes(
    job: Job, views: GroupViews, profile: RankProfile, nodes: Sequence[str]
) -> dict[str, WireTraffic]:
    """Return the bytes that a rank sends, by axis: the mean of all ranks of its pipeline rank.

    A ring visits its group in order, so the share of bytes between nodes is the share of ring links
    between nodes.
    """
    num_bytes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    crossing: dict[tuple[int, ...], float] = {}
    per_stage = job.grid.size // job.grid.pp
    ranks = range(profile.pp_rank * per_stage, (profile.pp_rank + 1) * per_stage)

    def crosses(group: tuple[int, ...]) -> float:
        if group not in crossing:
            ring = zip(group, group[1:] + group[:1], strict=True)
            crossing[group] = sum(nodes[a] != nodes[b] for a, b in ring) / len(group)
        return crossing[group]

    @functools.cache
    def share_between(group: tuple[int, ...], peer: int | None) -> float:
        if peer is not None:
            away = (job.grid.coordinates(peer).pp_rank - profile.pp_rank) * per_stage
            return fmean(nodes[rank] != nodes[rank + away] for rank in ranks)
        if len(group) == job.grid.size:
            return crosses(group)
        return fmean(crosses(views.group(group, profile, rank)) for rank in ranks)

    for _, call in profile.communication:
        share = share_between(call.group if call.peer is None else (), call.peer)
        both = num_bytes[
            axis_of(job.grid, call.group, to_peer=call.peer is not None, name=call.name)
        ]
        both[0] += call.wire_bytes * (1 - share)
        both[1] += call.wire_bytes * share
    return {axis: WireTraffic(*both) for axis, both in num_bytes.items()}


def simulate_schedule(job: Job) -> Timeline:
    """Simulate the schedule, with stage times from the costs of their layers;
    messages take no time.

    Costs are times on the reference device of :mod:`meshwright.pipeline.plan.costs`.
    """
    costs = stage_costs(
        job.blueprint.layer_costs, job.blueprint.stages, least_s=1e-9
    )  # each span has a length
    return simulate(job.blueprint.schedule, costs)


def busy_shares(timeline: Timeline) -> list[float]:
    """Return, for each pipeline rank, the share of compute in the time from the first forward
    to the last backward.
    """
    computed = [span for span in timeline.spans if span.action.kind in COMPUTE]
    total = max(span.end for span in computed) - min(span.start for span in computed)
    return [
        sum(span.end - span.start for span in computed if span.rank == rank) / total
        for rank in timeline.ranks
    ]


def flops_of(job: Job, pp_rank: int) -> float:
    """Return the FLOPs of one rank in a step, recomputation included,
    divided evenly over cp and tp.

    Newton-Schulz iterations are counted on the rank that takes most of them (its matrices'
    busiest home).
    """
    stages = job.blueprint.schedule.stages_of(pp_rank)
    costs = [
        job.blueprint.layer_costs[index]
        for stage in stages
        for index in job.blueprint.stages[stage]
    ]
    flops = sum(cost.forward.flops + cost.backward.flops for cost in costs)
    products = flops * batch_numbers(job.config.batch).chunks / (job.grid.tp * job.grid.cp)
    return products + newton_schulz_flops(
        job.config.parallel, job.config.optimizer, matrices_of_rank(job.blueprint, pp_rank)
    )


def num_parameters(job: Job, pp_rank: int) -> int:
    """Return the number of parameter elements of a rank's stages, on one tp rank;
    ZeRO does not reduce it.
    """
    stages = job.blueprint.schedule.stages_of(pp_rank)
    return sum(
        parameter.numel()
        for stage in stages
        for parameter in job.blueprint.stage_layers(stage).parameters()
    )


def runs_out_of_memory(job: Job, time: StepTimeEstimate | None) -> bool:
    """Return True if the fullest rank needs more than the memory of the device
    that ``time`` is for.
    """
    return time is not None and max(each.peak_bytes for each in job.profiles) > time.memory_bytes


def describe(
    job: Job,
    nodes: Sequence[str],
    found: Sequence[Disagreement],
    time: StepTimeEstimate | None = None,
) -> str:
    """Return the whole report as text.

    ``time`` adds seconds and MFU. Without it, the bubble is simulated from the layers' costs on a
    reference device.
    """
    grid, blueprint = job.grid, job.blueprint
    timeline = simulate_schedule(job) if time is None else time.timeline
    most = max(job.profiles, key=lambda each: each.peak_bytes)
    host = max(each.host_bytes + each.offloaded_bytes for each in job.profiles)
    memory, traffic = _memory_rows(job), _traffic_rows(job, nodes, busy_shares(timeline))
    lines = [
        (
            f"{job.config.model.builder}, {blueprint.num_parameters:,} parameters, on {grid} = "
            f"{format_number_of(grid.size, 'rank')} on {format_number_of(len(set(nodes)), 'node')}"
        ),
        (
            f"{blueprint.schedule.name},"
            f" {format_number_of(batch_numbers(job.config.batch).chunks, 'micro-batch')};"
            f" {format_number_of(len(set(job.representatives)), 'kind')} of pipeline ranks run;"
            f" each line holds for {format_number_of(grid.num_replicas * grid.tp, 'rank')}"
        ),
        "",
        "memory of a rank at its peak, and the rank's activity at that time",
        *format_table(memory, "<<>>>>>>>>"),
        "",
        (
            "what a rank computes in a step, and puts on the wire by axis: inside its node, and"
            " between nodes"
        ),
        *format_table(traffic, "<" + ">" * (len(traffic[0]) - 1)),
        "",
        f"most memory  {format_size(most.peak_bytes)} on pipeline rank {most.pp_rank}, in"
        f" {most.peak_in}"
        + (f"; and {format_size(host)} of the host's" if host else "")
        + (_overflow(time) if time is not None and runs_out_of_memory(job, time) else ""),
        f"bubble       {bubble_share(timeline):.1%} of the time"
        + (
            ""
            if time is not None
            else ", by the schedule and the layers' shares of time; messages cost nothing"
        ),
    ]
    lines += _predictions(job, nodes, time)
    if found:
        return "\n".join(
            [
                *lines,
                f"all ranks    DO NOT AGREE: {len(found)} found",
                *(f"  {each}" for each in found),
            ]
        )
    lines += [
        "all ranks    agree",
        (
            "  all ranks of a group issue the same collectives in one order, each send has a"
            " matching receive,"
        ),
        "  and no rank blocks forever",
    ]
    return "\n".join(lines)


def _predictions(job: Job, nodes: Sequence[str], time: StepTimeEstimate | None) -> Iterator[str]:
    """Yield the lines on the predicted step, and on a mirror in host memory."""
    links, step_s = None, 0.0
    if time is not None:
        links, step_s = time.links, time.step_s
        yield (
            f"step         {step_s:.3g} s, MFU {time.mfu_share:.1%}, predicted for {time.device}"
        )
        for at, line in enumerate(time.rows):
            yield f"{'' if at else 'rows':12} {line}"
    for at, line in enumerate(mirror_lines(job.blueprint, nodes, links, step_s)):
        yield f"{'' if at else 'mirror':12} {line}"


def _memory_rows(job: Job) -> list[tuple[str, ...]]:
    """Format one row of memory per pipeline rank, below a header."""
    main = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER, Category.ACTIVATIONS)
    rows: list[tuple[str, ...]] = [
        ("pp", "layers", "parameters", "peak", "in", *map(str, main), "rest")
    ]
    for pp_rank, profile in enumerate(job.profiles):
        sizes = [profile.held.get(category, 0) for category in main]
        stages = job.blueprint.schedule.stages_of(pp_rank)
        names = [list(dict(job.blueprint.stage_layers(stage).named_children())) for stage in stages]
        rows.append(
            (
                str(pp_rank),
                " ".join(first_to_last(each[0], each[-1]) for each in names),
                f"{num_parameters(job, pp_rank):,}",
                format_size(profile.peak_bytes),
                str(profile.peak_in),
                *map(format_size, sizes),
                format_size(profile.peak_bytes + profile.host_bytes - sum(sizes)),
            )
        )
    return rows


def _traffic_rows(job: Job, nodes: Sequence[str], busy: Sequence[float]) -> list[tuple[str, ...]]:
    """Format one row of FLOPs and bytes on the wire per pipeline rank, below a header;
    unused axes have no column.
    """
    views = GroupViews(job)
    on_wire = [wire_bytes(job, views, profile, nodes) for profile in job.profiles]
    columns = {}
    for axis in ("tp", "cp", "ep", "pp", "dp", "tied", "world"):
        traffic = [each.get(axis, WireTraffic(0.0, 0.0)) for each in on_wire]
        columns[f"{axis} inside"] = [each.inside for each in traffic]
        columns[f"{axis} between"] = [each.between for each in traffic]
    columns = {title: numbers for title, numbers in columns.items() if any(numbers)}
    rows: list[tuple[str, ...]] = [("pp", "FLOP", "busy", *columns)]
    for pp_rank, share in enumerate(busy):
        cells = [format_size(round(n[pp_rank])) if n[pp_rank] else "-" for n in columns.values()]
        rows.append((str(pp_rank), flops_text(flops_of(job, pp_rank)), f"{share:.1%}", *cells))
    return rows


def _overflow(time: StepTimeEstimate) -> str:
    room = format_size(time.memory_bytes)
    hint = "`plan` searches for layouts that fit"
    return (
        f"\n             MORE THAN THE {room} of {time.device}: it will run out of memory; {hint}"
    )


def flops_text(flops: float) -> str:
    """Format FLOPs with three digits, in the unit that fits."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if flops >= size:
            return f"{flops / size:,.3g} {unit}"
    return f"{flops / 1e6:,.3g} M"


def figure(job: Job, time: StepTimeEstimate | None = None) -> Figure:
    """Draw the memory of each pipeline rank, stacked by category, beside its timeline."""
    from matplotlib.figure import Figure

    from meshwright_plan.picture.palette import shade

    timeline = simulate_schedule(job) if time is None else time.timeline
    picture = Figure(figsize=(13, max(3.0, 0.42 * job.grid.pp + 1.6)), layout="constrained")
    bars, schedule = picture.subplots(1, 2, sharey=True, width_ratios=[2, 3])
    left = [0.0] * job.grid.pp
    shown = [
        category for category in Category if any(each.held.get(category) for each in job.profiles)
    ]
    for number, category in enumerate(shown):
        sizes = [each.held.get(category, 0) / GIB for each in job.profiles]
        bars.barh(range(job.grid.pp), sizes, left=left, color=f"C{number}", label=str(category))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    bars.set_xlabel("GiB at the peak")
    bars.set_ylabel("pipeline rank")
    bars.set_yticks(range(job.grid.pp))
    bars.invert_yaxis()
    bars.legend(fontsize=8)
    for span in timeline.spans:
        if span.action.kind in COMPUTE:
            stages = job.blueprint.schedule.stages_of(span.rank)
            assert span.action.stage is not None
            colour = shade(span.action.kind, stages.index(span.action.stage), len(stages))
            schedule.barh(
                span.rank,
                span.end - span.start,
                left=span.start,
                color=colour,
                edgecolor="white",
                lw=0.3,
            )
    schedule.set_xlabel("seconds" if time is not None else "time by the layers' shares")
    picture.suptitle(
        f"{job.config.run.name}: {job.grid.size:,} ranks, {job.blueprint.schedule.name}"
    )
    return picture
