"""Step time with rows of unequal work: dealt by their index and by their work (``batch.balance``).

    document starts of the corpus -> work of each row
    the deal of each step         -> load of each micro-batch: its attention over that of the plan
    loads                         -> seconds of its stages -> simulated schedule of each replica

A step ends with its slowest replica. Where replicas meet after each micro-batch (ZeRO-2 and -3,
shared experts), each micro-batch takes as long as the slowest replica's. The time of a plan itself
is that of rows of equal work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig, batch_numbers, reduces_each_microbatch
from meshwright.data.causal import CorpusSource
from meshwright.data.sources import open_sources
from meshwright.data.work import Dealt, by_index, deal, replica_excess
from meshwright.errors import UserError
from meshwright.schedule.action import COMPUTE, Schedule, actions_of
from meshwright.schedule.analysis import Costs
from meshwright.schedule.build import build
from meshwright_plan.planner.context import MAX_SAMPLES, scale_attention
from meshwright_plan.planner.cost import (
    sharing_factor,
    simulation_costs,
    stage_times,
    waits_factor,
)
from meshwright_plan.planner.fast_simulation import simulate_fast
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import RankedLayout
from meshwright_plan.planner.rates import PerformanceModel

MAX_STEPS = 8
"""Number of steps whose rows are dealt."""
MAX_ROWS = 8192
"""Rows whose documents are read, unless one step has more."""
MAX_ACTIONS = 400_000
"""Computations that are simulated: of fewer steps where a step has many."""
LOW, HIGH = 0.5, 1.5
"""Loads at which stages are timed: between them attention's seconds are taken as linear."""
CANDIDATES = 2
"""Replicas of a step that are simulated: those with the most work."""

Loads = NDArray[np.float64]
"""(dp, chunks) attention of each micro-batch, over that of the plan's profiles."""


class DealtTimes(NamedTuple):
    """Predicted step times by the way in which rows are dealt, "index" or "work"."""

    seconds: dict[str, list[float]]
    """Seconds of each step from the first on."""
    excess: dict[str, list[float]]
    """Work of the busiest replica over the mean, minus 1, in each step."""

    @property
    def ratio(self) -> float:
        """Step time by work over step time by index."""
        return fmean(self.seconds["work"]) / fmean(self.seconds["index"])


def row_times(
    cache: ModelCache, performance: PerformanceModel, of: RankedLayout
) -> DealtTimes | None:
    """Return the predicted step times of a layout; None where rows have equal work, or one
    micro-batch at a time holds all of them.

    None also where ranks share a core: they give each other the time that they wait.
    """
    layout, grid = of.layout, of.layout.grid
    batch = batch_numbers(layout.config.batch)
    has_cores = any(layer.cores for layer in layout.layers)
    is_shared = sharing_factor(layout, performance.hardware) > 1
    if grid.dp * batch.chunks == 1 or grid.dp * grid.pp == 1 or not has_cores or is_shared:
        return None
    work = cache.cached(("work of rows", batch.global_batch), lambda: _work_of(cache.config))
    if work is None:
        return None
    pipeline = _Pipeline(layout, performance, work[:MAX_SAMPLES].mean() * batch.micro_batch_size)
    num_steps = min(pipeline.most_steps, len(work) // batch.global_batch)
    steps = work[: num_steps * batch.global_batch].reshape(num_steps, -1)
    numbers = grid.dp, batch.chunks, batch.micro_batch_size
    ways: dict[str, Callable[[NDArray[np.int64]], Dealt]] = {
        "index": lambda rows: by_index(len(rows), grid.dp, batch.chunks),
        "work": lambda rows: deal(rows, *numbers),
    }
    # what is not the pipeline stays as it is in the plan
    factor = waits_factor(layout, performance)
    rest_s = of.time.total - pipeline.even_s * factor
    found = DealtTimes({}, {})
    for name, way in ways.items():
        dealt = [(rows, way(rows)) for rows in steps]
        found.seconds[name] = [
            rest_s + pipeline.seconds(rows[at].sum(2)) * factor for rows, at in dealt
        ]
        found.excess[name] = [replica_excess(rows, at) for rows, at in dealt]
    return found


def row_lines(cache: ModelCache, hardware: Hardware, of: RankedLayout) -> list[str]:
    """Return :func:`row_times` as two lines of text; none where there is nothing to deal."""
    found = row_times(cache, PerformanceModel.of(hardware), of)
    if found is None:
        return []
    by_index_s, by_work_s = (fmean(found.seconds[name]) for name in ("index", "work"))
    at_index, at_work = (fmean(found.excess[name]) for name in ("index", "work"))
    return [
        f"{by_index_s:.4g} s a step dealt by index, {by_work_s:.4g} s by work"
        f' ({1 - found.ratio:.1%} less; batch.balance = "work"): the busiest replica sees',
        f"{at_index:.1%} and {at_work:.1%} more keys than the mean, over"
        f" {len(found.seconds['index'])} steps; {of.time.total:.4g} s is for equal rows",
    ]


def _work_of(config: RunConfig) -> NDArray[np.int64] | None:
    """Return the work of the rows of some steps from the first on; None without the documents of a
    corpus.
    """
    if not config.data.document_boundaries:
        return None
    try:
        source, _ = open_sources(config)
    except UserError:  # the corpus is elsewhere, or not yet there
        return None
    if not isinstance(source, CorpusSource):
        return None
    global_batch = batch_numbers(config.batch).global_batch
    num_steps = max(1, min(MAX_STEPS, MAX_ROWS // global_batch))
    return source.work(range(max(MAX_SAMPLES, num_steps * global_batch)))


class _Pipeline:
    """Pipeline of one replica, with micro-batches of unequal attention."""

    def __init__(
        self, layout: LayoutModel, performance: PerformanceModel, mean_work: float
    ) -> None:
        """Simulate rows of equal work.

        ``mean_work``: work of a micro-batch whose attention is that of the layout's profiles.
        """
        self._layout = layout
        self._performance = performance._replace(num_ranks=layout.grid.size)
        self._mean_work = mean_work
        self._schedule = _computations(layout)
        parallel = layout.config.parallel
        self._meet_in_step = reduces_each_microbatch(parallel) or parallel.zero == 3
        self._meet_in_step |= parallel.ep > 1
        self._low, self._high = (self._costs(load) for load in (LOW, HIGH))
        self.even_s = self._simulated_s(np.ones(self._schedule.chunks))

    @property
    def most_steps(self) -> int:
        """Number of steps that are simulated at most."""
        num_actions = sum(len(row) for row in self._schedule.rows) * CANDIDATES * 2
        return max(1, MAX_ACTIONS // num_actions)

    def seconds(self, work: NDArray[np.int64]) -> float:
        """Return the seconds of the slowest replica. ``work``: of micro-batches, (dp, chunks)."""
        loads: Loads = work / self._mean_work
        if self._meet_in_step:
            return self._simulated_s(loads.max(0))
        busiest = np.argsort(-loads.sum(1), kind="stable")[:CANDIDATES]
        return max(self._simulated_s(loads[replica]) for replica in busiest)

    def _costs(self, factor: float) -> list[Costs]:
        """Return the costs of each stage with ``factor`` times the attention."""
        layout = self._layout
        scaled = {
            id(each.forward): scale_attention(each, factor) for each in layout.layers if each.cores
        }
        layers = tuple(scaled.get(id(each.forward), each) for each in layout.layers)
        stages = stage_times(replace(layout, layers=layers), self._performance)
        return simulation_costs(layout, stages, self._performance.traits)

    def _simulated_s(self, loads: NDArray[np.float64]) -> float:
        """Return the seconds of a pipeline with these loads, (chunks,)."""
        by_microbatch = [
            [_between(*pair, float(load)) for pair in zip(self._low, self._high, strict=True)]
            for load in loads
        ]
        timeline = simulate_fast(self._schedule, self._low, by_microbatch)
        return max(span.end for span in timeline.spans)


def _between(low: Costs, high: Costs, load: float) -> Costs:
    """Return the costs of a stage at a load, on the line through those at LOW and HIGH."""
    share = (load - LOW) / (HIGH - LOW)
    return low._replace(
        f=low.f + share * (high.f - low.f),
        b=low.b + share * (high.b - low.b),
        i=low.i + share * (high.i - low.i),
        w=low.w + share * (high.w - low.w),
    )


def _computations(layout: LayoutModel) -> Schedule:
    """Return the computations of the layout's schedule, with all micro-batches of a step."""
    schedule, chunks = layout.schedule, batch_numbers(layout.config.batch).chunks
    if schedule.chunks != chunks:  # a search takes a shorter schedule
        interleave = layout.config.pipeline.stages_per_rank
        return build(schedule.name, schedule.pp, chunks, interleave)
    rows = (
        tuple(item for item in row if actions_of(item)[0].kind in COMPUTE) for row in schedule.rows
    )
    return replace(schedule, rows=tuple(rows))
