"""Fast estimates of a layout's time and memory, good enough to select layouts for full evaluation.

    compute_schedule, lowered_schedule   its schedule, or an equivalent one with fewer micro-batches
    in_flight                            micro-batches that each pipeline rank holds
    estimate_s, estimate_bytes           seconds of a step, peak of the fullest rank

Results are cached in ``ModelCache.results``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.config import V_SCHEDULES
from meshwright.optimizer.at_rest import Elements, held_at_rest
from meshwright.parameters import DTYPES
from meshwright.schedule.action import Placement, Schedule
from meshwright.schedule.analysis import peak_activations
from meshwright.schedule.build import build
from meshwright.schedule.load import lowered_schedule as build_lowered
from meshwright_plan.planner.choice import Choice, with_choice
from meshwright_plan.planner.cost import step_time
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.memory.units import StageUnits
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.stage_time import stages_by_rank

SHORT_PP = 8
"""Pipeline ranks of the shorter pipeline;
longer ones are extrapolated from this size and twice it.
"""
STEADY_CHUNKS = 3
"""Micro-batches per pipeline rank in a shortened schedule."""


def empty_schedule(choice: Choice) -> Schedule:
    """Return a schedule without actions, with the numbers of a choice."""
    rows: tuple[tuple[()], ...] = ((),) * choice.pp
    numbers = choice.schedule, choice.pp, choice.pp * choice.interleave, choice.chunks
    return Schedule(*numbers, rows, placement_of(choice))


def placement_of(choice: Choice) -> Placement:
    """Return the placement of the stages of a choice's schedule."""
    return Placement.V if choice.schedule in V_SCHEDULES else Placement.LOOP


def in_flight(cache: ModelCache, choice: Choice) -> tuple[int, ...]:
    """Return the peak number of micro-batches in flight on each pipeline rank,
    counted once per stage.

    In a long pipeline, the first, middle and last ranks are extrapolated from two shorter
    pipelines.
    """
    chunks = _steady_chunks(choice)

    def count() -> tuple[int, ...]:
        shortens = 2 * SHORT_PP < choice.pp <= chunks
        peaks = [
            peak_activations(
                build(choice.schedule, pp, round(chunks * pp / choice.pp), choice.interleave)
            )
            for pp in ((SHORT_PP, 2 * SHORT_PP) if shortens else (choice.pp,))
        ]
        if not shortens:
            return peaks[0]
        growth = (choice.pp - 2 * SHORT_PP) / SHORT_PP
        first, middle, last = (
            math.ceil(
                peaks[1][at]
                + growth * (peaks[1][at] - peaks[0][at // 2 if at + 1 < 2 * SHORT_PP else -1])
            )
            for at in (0, SHORT_PP, 2 * SHORT_PP - 1)
        )
        half = choice.pp // 2
        return (first, *(middle,) * half, *(last,) * (choice.pp - half - 1))

    return cache.cached(("in flight", choice.schedule, choice.pp, chunks, choice.interleave), count)


def _steady_chunks(choice: Choice) -> int:
    """Return a number of micro-batches beyond which each further one adds constant time
    and no memory.

    Interleaved schedules work in groups of pp, and a remainder makes the groups larger, so the
    remainder is kept.
    """
    pp, chunks = choice.pp, choice.chunks
    return STEADY_CHUNKS * pp + chunks % pp if chunks > STEADY_CHUNKS * pp else chunks


def compute_schedule(cache: ModelCache, choice: Choice) -> Schedule:
    """Return the choice's schedule of computations,
    or an equivalent one with fewer micro-batches.
    """
    return _cached_schedule(cache, choice, build)


def lowered_schedule(cache: ModelCache, choice: Choice) -> Schedule:
    """Return the choice's lowered schedule, or an equivalent one with fewer micro-batches."""
    return _cached_schedule(cache, choice, build_lowered)


def _cached_schedule(
    cache: ModelCache, choice: Choice, builder: Callable[[str, int, int, int], Schedule]
) -> Schedule:
    numbers = choice.schedule, choice.pp, _steady_chunks(choice), choice.interleave
    return cache.cached((builder, *numbers), lambda: builder(*numbers))


def _stages_of(choice: Choice) -> tuple[object, ...]:
    """Return a key: the fields on which layer profiles and stages depend."""
    degrees = choice.pp, choice.cp, choice.tp, choice.ep, choice.sequence, choice.interleave
    of_units = choice.unit_layers, choice.keeps_gathered
    layers = choice.micro_batch_size, choice.recompute, choice.exchange, choice.order
    return (*degrees, *layers, *of_units)


def _approximate_layout(cache: ModelCache, choice: Choice) -> LayoutModel:
    """Return a layout with the stages, profiles and footprints of a choice. Its schedule has no
    actions, and its configuration may be that of another choice with equal stages.
    """
    schedule = empty_schedule(choice)

    def build_layout() -> LayoutModel:
        return cache.layout(with_choice(cache.config, choice), schedule, approximate=True)

    return replace(
        cache.cached(("approximate layout", _stages_of(choice)), build_layout), schedule=schedule
    )


def _extrapolated(choice: Choice, value: Callable[[Choice], float]) -> float:
    """Evaluate ``value``; for micro-batches of more than 2 samples,
    extrapolate linearly from those of 1 and 2.
    """
    if choice.micro_batch_size <= 2:
        return value(choice)
    one, two = (value(choice._replace(micro_batch_size=few)) for few in (1, 2))
    return one + (two - one) * (choice.micro_batch_size - 1)


def estimate_s(cache: ModelCache, performance: PerformanceModel, choice: Choice) -> float:
    """Return the estimated seconds of a step."""

    def seconds(of: Choice) -> float:
        layout = replace(_approximate_layout(cache, of), config=with_choice(cache.config, of))
        return step_time(layout, performance, simulated=False, results=cache.results).total

    return _extrapolated(choice, seconds)


def estimate_bytes(cache: ModelCache, choice: Choice) -> int:
    """Return the estimated peak bytes of the fullest among the first,
    middle and last pipeline ranks.
    """
    num_in_flight = in_flight(cache, choice)
    ranks = sorted({0, choice.pp // 2, choice.pp - 1})

    def held(of: Choice) -> list[tuple[tuple[Elements, ...], float]]:
        """Return (elements of each stage, bytes besides those at rest) of each of the ranks."""
        layout, found = _approximate_layout(cache, of), []
        by_rank = stages_by_rank(layout.schedule)
        for rank in ranks:
            stages = by_rank[rank]
            kept = _kept_bytes(layout, stages, num_in_flight[rank])
            temporary = max(max(p.bytes for p in layout.footprints[s].backward) for s in stages)
            elements = tuple(layout.elements[s] for s in stages)
            gathered = sum(_gathered_bytes(layout, s) for s in stages)
            found.append((elements, kept + gathered + max(temporary, 0)))
        return found

    def at_rest(of: Choice, elements: tuple[Elements, ...]) -> int:
        def count() -> int:
            config = with_choice(cache.config, of)
            return sum(
                sum(held_at_rest(config.parallel, config.optimizer, config.train.dtype, each)[:3])
                for each in elements
            )

        return cache.cached(
            ("at rest", of.degrees, of.zero, of.shard_factor, of.offload, elements), count
        )

    def peak(of: Choice) -> float:
        key = (
            "held",
            _stages_of(of),
            placement_of(of),
            tuple(num_in_flight[rank] for rank in ranks),
        )
        return max(
            at_rest(of, elements) + rest for elements, rest in cache.cached(key, lambda: held(of))
        )

    def cached_peak(of: Choice) -> float:
        key = ("needed", of._replace(chunks=0), tuple(num_in_flight[rank] for rank in ranks))
        return cache.cached(key, lambda: peak(of))

    return int(_extrapolated(choice, cached_peak))


def _kept_bytes(layout: LayoutModel, stages: Sequence[int], num_in_flight: int) -> float:
    """Return the bytes that a rank keeps for backward,
    of ``num_in_flight`` micro-batches over its stages.

    Beside other stages of its rank, the one with the loss has a single micro-batch in flight: its
    backward follows.
    """
    kept = {
        stage: layout.footprints[stage].kept + layout.footprints[stage].inputs for stage in stages
    }
    with_loss = layout.schedule.num_stages - 1
    if with_loss not in kept or len(kept) == 1:
        return num_in_flight * sum(kept.values()) / len(kept)
    alone = kept.pop(with_loss)
    return alone + (num_in_flight - 1) * sum(kept.values()) / len(kept)


def _gathered_bytes(layout: LayoutModel, stage: int) -> int:
    """Return the bytes of a stage's weights that stay gathered between forward and backward."""
    of = layout.footprints[stage]
    itemsize = DTYPES[layout.config.train.dtype].itemsize
    return itemsize * StageUnits(of.backward, of.units).kept


def least_bytes(cache: ModelCache, choice: Choice) -> tuple[int, int]:
    """Return a rank's (device, host) bytes at rest,
    if the model were divided evenly over the pipeline ranks.
    """
    share = cache.total_elements(choice.tp, choice.sequence, choice.ep).divided(choice.pp)
    config = with_choice(cache.config, choice)
    *device_bytes, host_bytes = held_at_rest(
        config.parallel, config.optimizer, config.train.dtype, share
    )
    return sum(device_bytes), host_bytes
