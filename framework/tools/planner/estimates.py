"""Quick estimates of a layout's time and memory, good enough to select layouts for full evaluation.

    computed, drawn   its schedule, or an equivalent one with fewer micro-batches
    in_flight         micro-batches that each pipeline rank holds; long pipelines are extrapolated from shorter ones
    quick_s           seconds by formula, quick_bytes the peak of its fullest rank

Results are cached in ``Workbench.seen``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshwright.schedule.action import Placement, Schedule
from meshwright.schedule.analysis import peak_activations
from meshwright.schedule.build import build
from meshwright.schedule.load import lowered_schedule as build_lowered
from meshwright.tools.planner.choices import Choice, with_choice
from meshwright.tools.planner.cost import stages_by_rank, step_time
from meshwright.tools.planner.hardware import Hardware
from meshwright.tools.planner.layout_model import LayoutModel, ModelCache
from meshwright.tools.planner.rates import FrameworkTraits, RateFractions
from meshwright.tools.summary import held_at_rest

SHORT = 8
"""Pipeline ranks of the shorter pipeline; longer ones are extrapolated from this size and twice it."""
ENOUGH = 3
"""Micro-batches per pipeline rank in a shortened schedule."""


def empty_schedule(choice: Choice) -> Schedule:
    """Return a schedule without actions, with the numbers of a choice."""
    placement = Placement.V if choice.schedule in ("zb_v", "v_half", "v_min") else Placement.LOOP
    rows: tuple[tuple[()], ...] = ((),) * choice.pp
    return Schedule(choice.schedule, choice.pp, choice.pp * choice.interleave, choice.chunks, rows, placement)


def in_flight(workbench: ModelCache, choice: Choice) -> tuple[int, ...]:
    """Return the peak number of micro-batches that each pipeline rank holds, counted once per stage.

    In a long pipeline, the first, middle and last ranks are extrapolated from two shorter pipelines.
    """
    chunks = _in_full_swing(choice)
    key = ("in flight", choice.schedule, choice.pp, chunks, choice.interleave)
    if key not in workbench.seen:
        shortens = 2 * SHORT < choice.pp <= chunks
        peaks = [
            peak_activations(build(choice.schedule, pp, round(chunks * pp / choice.pp), choice.interleave))
            for pp in ((SHORT, 2 * SHORT) if shortens else (choice.pp,))
        ]
        if shortens:
            more = (choice.pp - 2 * SHORT) / SHORT
            first, middle, last = (
                math.ceil(peaks[1][at] + more * (peaks[1][at] - peaks[0][at // 2 if at + 1 < 2 * SHORT else -1]))
                for at in (0, SHORT, 2 * SHORT - 1)
            )
            half = choice.pp // 2
            peaks = [(first, *(middle,) * half, *(last,) * (choice.pp - half - 1))]
        workbench.seen[key] = peaks[0]
    found: tuple[int, ...] = workbench.seen[key]
    return found


def _in_full_swing(choice: Choice) -> int:
    """Return a number of micro-batches beyond which each further one adds constant time and no memory.

    Interleaved schedules work in groups of pp, and a remainder makes the groups larger, so the remainder is kept.
    """
    pp, chunks = choice.pp, choice.chunks
    return ENOUGH * pp + chunks % pp if chunks > ENOUGH * pp else chunks


def compute_schedule(workbench: ModelCache, choice: Choice) -> Schedule:
    """Return the choice's schedule of computations, or an equivalent one with fewer micro-batches."""
    chunks = _in_full_swing(choice)
    key = ("computed", choice.schedule, choice.pp, chunks, choice.interleave)
    if key not in workbench.seen:
        workbench.seen[key] = build(choice.schedule, choice.pp, chunks, choice.interleave)
    schedule: Schedule = workbench.seen[key]
    return schedule


def lowered_schedule(workbench: ModelCache, choice: Choice) -> Schedule:
    """Return the choice's lowered schedule, or an equivalent one with fewer micro-batches."""
    chunks = _in_full_swing(choice)
    key = ("schedule", choice.schedule, choice.pp, chunks, choice.interleave)
    if key not in workbench.seen:
        workbench.seen[key] = build_lowered(choice.schedule, choice.pp, chunks, choice.interleave)
    schedule: Schedule = workbench.seen[key]
    return schedule


def _rough(workbench: ModelCache, choice: Choice) -> LayoutModel:
    return workbench.sketch(with_choice(workbench.config, choice), empty_schedule(choice), roughly=True)


def _by_few(choice: Choice, value: Callable[[Choice], float]) -> float:
    """Evaluate ``value``; micro-batches above 2 samples are extrapolated linearly from those of 1 and 2."""
    if choice.micro_batch_size <= 2:
        return value(choice)
    one, two = (value(choice._replace(micro_batch_size=few)) for few in (1, 2))
    return one + (two - one) * (choice.micro_batch_size - 1)


def quick_s(
    workbench: ModelCache,
    hardware: Hardware,
    choice: Choice,
    reached: RateFractions | None,
    habits: FrameworkTraits | None,
) -> float:
    """Return the estimated seconds of a step."""

    def seconds(of: Choice) -> float:
        sketch = _rough(workbench, of)
        return step_time(sketch, hardware, reached, habits, simulated=False, seen=workbench.seen).total

    return _by_few(choice, seconds)


def quick_bytes(workbench: ModelCache, choice: Choice) -> int:
    """Return the estimated peak bytes of the fullest among the first, middle and last pipeline ranks."""
    flying = in_flight(workbench, choice)
    ranks = sorted({0, choice.pp // 2, choice.pp - 1})

    def needed(of: Choice) -> float:
        key = ("needed", of._replace(chunks=0), tuple(flying[rank] for rank in ranks))
        if key not in workbench.seen:
            sketch, most = _rough(workbench, of), 0.0
            by_rank = stages_by_rank(sketch.schedule)
            for rank in ranks:
                stages = by_rank[rank]
                held = sum(sum(held_at_rest(sketch.config, sketch.elements[stage])[:3]) for stage in stages)
                kept = sum(sketch.footprints[s].kept + sketch.footprints[s].inputs for s in stages) / len(stages)
                besides = max(max(p.bytes for p in sketch.footprints[s].backward) for s in stages)
                most = max(most, held + kept * flying[rank] + max(besides, 0))
            workbench.seen[key] = most
        found: float = workbench.seen[key]
        return found

    return int(_by_few(choice, needed))


def least_bytes(workbench: ModelCache, choice: Choice) -> int:
    """Return the bytes of a rank at rest if all pipeline ranks hold the same."""
    config = with_choice(workbench.config, choice)
    total = workbench.total_elements(choice.tp, choice.sequence)
    share = type(total)(*(number // choice.pp for number in total))
    return sum(held_at_rest(config, share)[:3])


def least_host_bytes(workbench: ModelCache, alike: Sequence[Choice]) -> int:
    """Return the same in host memory, for the choice that shards most."""
    most = max(alike, key=lambda each: (each.zero, each.shard_factor))
    total = workbench.total_elements(most.tp, most.sequence)
    share = type(total)(*(number // most.pp for number in total))
    return held_at_rest(with_choice(workbench.config, most), share)[3]
