"""Search over all layouts of a model on a cluster: counts of rejected ones by rule,
the others ranked by time.

degrees, batch, schedule, ZeRO stage, recompute        every combination that the rules allow     choices.py
  -> time and memory by formula                         all of them
  -> schedule simulated, memory along its rows          in that order, until the best are known
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple

from meshwright.terminal.format import format_size
from meshwright_plan.planner.choice import Choice, Degrees, Rejection, Shape, with_choice
from meshwright_plan.planner.choices import choices
from meshwright_plan.planner.estimates import (
    compute_schedule,
    estimate_bytes,
    estimate_s,
    least_bytes,
    lowered_schedule,
)
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import (
    Plan,
    RankedLayout,
    backend_of,
    evaluate,
    ranked_layout,
    usable_bytes,
)
from meshwright_plan.planner.ranking import choose_lines, complexity, group_alike, is_tie
from meshwright_plan.planner.rates import PerformanceModel

BEST = 10
MAX_EVALUATED = 60
FASTEST, SIMPLEST = 3, 3
"""Numbers of layouts of the same degrees that are evaluated before their near-duplicates."""
UNKNOWN_BYTES = 2**62


class _Estimate(NamedTuple):
    """Estimate of a layout by formula, in the order in which layouts are evaluated."""

    seconds: float
    zero: int
    bytes: int
    choice: Choice


def search(
    cache: ModelCache,
    hardware: Hardware,
    nodes: int,
    *,
    best: int = BEST,
    offload: bool = False,
    settles: bool = False,
) -> Plan:
    """Search all layouts of the cache's model and batch on ``nodes`` nodes.

    ``settles``: near-duplicates count as one of the ``best``; the simplest layout that ties with
        the fastest is first.
    """
    hardware.check_dtype(cache.config.train.dtype)
    plan = Plan(cache.config, hardware, nodes, [], [], 0, 0, cache.error_bar(hardware))
    run = _Search(cache, hardware, plan, usable_bytes(hardware))
    run.estimate_all(offload)
    if settles:
        lines = choose_lines(run.rank(best, distinct=True), best, run.lowered)
        plan.best = [line.layout for line in lines]
        plan.alike = {
            line.layout.choice: tuple(each.choice for each in line.alike)
            for line in lines
            if line.alike
        }
    else:
        plan.best = run.rank(best)[:best]
    plan.num_fitting -= len(run.failed)
    plan.trade_off = [
        (e.seconds, e.bytes, e.choice) for e in run.estimates if e.choice not in run.failed
    ]
    for reason, large in run.too_large.items():
        plan.rejected.append(_memory_rejection(reason, large, run.room))
    if not plan.best and run.too_large:
        plan.closest = min(chain.from_iterable(run.too_large.values()), key=lambda each: each[0])
    return plan


def _memory_rejection(reason: str, large: Sequence[tuple[int, Choice]], room: int) -> Rejection:
    least, choice = min(large, key=lambda each: each[0])
    closest = f" (the closest by {format_size(least - room)})" if least < UNKNOWN_BYTES else ""
    rule = f"memory, {reason}: more than the usable {format_size(room)} of a device{closest}"
    return Rejection(rule, str(choice), len(large))


@dataclass
class _Search:
    """Search in progress: estimates of all layouts by formula,
    then the evaluation of the best ones.

    The evaluation times a layout from its schedule of computations. The fastest layout is also
    lowered, as it will run.
    """

    cache: ModelCache
    hardware: Hardware
    plan: Plan
    room: int
    """Bytes of a device that a layout may use."""
    estimates: list[_Estimate] = field(default_factory=list)
    """Estimates of the layouts that fit; those of skipped choices follow
    when a faster one turns out not to fit.
    """
    skipped: dict[Shape, list[Choice]] = field(default_factory=lambda: defaultdict(list))
    """Choices not evaluated because one that shards or recomputes less, and so is never slower,
    fits by formula.
    """
    too_large: dict[str, list[tuple[int, Choice]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Reason -> (bytes, choice) of the layouts that do not fit."""
    failed: set[Choice] = field(default_factory=set)
    """Choices that fit by formula and turned out not to fit."""

    def __post_init__(self) -> None:
        self.performance = PerformanceModel.of(self.hardware)

    def estimate_all(self, offload: bool) -> None:
        """Estimate every layout; count those that the rules allow,
        and record those that they do not.
        """
        tried: set[tuple[Degrees, int]] = set()
        fits: set[tuple[Degrees, int]] = set()
        offered = choices(self.cache, self.hardware, self.plan.nodes, offload=offload)
        for shape, group in groupby(
            offered, key=lambda each: None if isinstance(each, Rejection) else each.shape
        ):
            if shape is None:
                self.plan.rejected += [each for each in group if isinstance(each, Rejection)]
                continue
            alike = [each for each in group if isinstance(each, Choice)]
            self.plan.num_choices += len(alike)
            if offload and not self._fits_host(alike):
                continue
            degrees, _, _, size, _ = shape
            tried.add((degrees, size))
            smaller = (degrees, size // 2)
            if smaller in tried and smaller not in fits:
                reason = "already with fewer samples per micro-batch"
                self.too_large[reason] += [(UNKNOWN_BYTES, each) for each in alike]
            elif self._estimate(alike):
                fits.add((degrees, size))

    def _fits_host(self, alike: Sequence[Choice]) -> bool:
        """Check that the offloaded optimizer fits into the memory of a node's host."""
        most_sharded = max(alike, key=lambda each: (each.zero, each.shard_factor))
        needed = least_bytes(self.cache, most_sharded)[1] * self.hardware.devices_per_node
        available = self.hardware.host_memory_bytes
        if needed > available:
            text = f"{format_size(needed)} of a node's host, which has {format_size(available)}"
            rule = f"memory, the optimizer on the host: {text}"
            self.plan.rejected.append(Rejection(rule, str(alike[0]), len(alike)))
        return needed <= available

    def _estimate(self, alike: Sequence[Choice]) -> bool:
        """Estimate choices that differ only in sharding and recompute; return True if any fits."""
        least = max(
            alike,
            key=lambda each: (
                each.zero,
                each.recompute == "full",
                each.shard_factor,
                not each.keeps_gathered,
                -each.unit_layers,
            ),
        )
        at_rest, _ = least_bytes(self.cache, least)
        if at_rest > self.room:
            self.too_large["weights, gradients and optimizer alone"] += [(at_rest, least)] * len(
                alike
            )
            return False
        needed = estimate_bytes(self.cache, least)
        if needed > self.room:
            self.too_large["with activations"] += [(needed, least)] * len(alike)
            return False
        fitting: list[Choice] = []
        for each in alike:
            if _is_skipped(each, fitting):
                self.plan.num_fitting += 1
                self.skipped[each.shape].append(each)
            elif (needed := estimate_bytes(self.cache, each)) > self.room:
                self.too_large["with activations"].append((needed, each))
            else:
                self.plan.num_fitting += 1
                fitting.append(each)
                self.estimates.append(self._estimate_of(each, needed))
        return bool(fitting)

    def _estimate_of(self, choice: Choice, num_bytes: int) -> _Estimate:
        return _Estimate(
            estimate_s(self.cache, self.performance, choice), choice.zero, num_bytes, choice
        )

    def rank(self, number: int, *, distinct: bool = False) -> list[RankedLayout]:
        """Return layouts that fit, ordered by time, among them the best ``number``; ``distinct``:
        near-duplicates count as one.
        """
        waiting = sorted(_postponed(self.estimates) if distinct else self.estimates)
        ranked: list[RankedLayout] = []
        fitting: dict[Shape, list[Choice]] = defaultdict(list)
        num_evaluated = 0
        while True:
            best = (
                [line.fastest_s for line in group_alike(ranked)]
                if distinct
                else [each.time.total for each in ranked]
            )
            slowest = best[number - 1] if len(best) >= number else math.inf
            if (
                waiting
                and waiting[0].seconds <= slowest
                and (num_evaluated < MAX_EVALUATED or not ranked)
            ):
                choice = heapq.heappop(waiting).choice
                if _is_skipped(choice, fitting[choice.shape]):
                    self.skipped[choice.shape].append(choice)
                elif each := self._evaluate(choice):
                    num_evaluated += 1
                    fitting[choice.shape].append(choice)
                    insort(ranked, each, key=lambda each: each.time.total)
                else:
                    self._drop(choice, waiting)
            elif not ranked or self._first_fits(ranked):
                break
            else:
                first = ranked.pop(0).choice
                fitting[first.shape].remove(first)
                self._drop(first, waiting)
        return ranked

    def _evaluate(self, choice: Choice) -> RankedLayout | None:
        """Evaluate a layout: time from its computations,
        memory from its row with approximate message positions.

        Returns None if it does not fit.
        """
        layout = self.cache.layout(
            with_choice(self.cache.config, choice), compute_schedule(self.cache, choice)
        )
        memory = tuple(
            layout.memory(rank, backend_of(self.hardware)) for rank in layout.unlike_ranks()
        )
        if self._is_too_large(choice, max(each.total for each in memory)):
            return None
        return ranked_layout(self.cache, self.performance, choice, layout, memory)

    def _first_fits(self, ranked: list[RankedLayout]) -> bool:
        """Lower the fastest layout as it will run, and replace its estimate if it still fits."""
        whole = self.lowered(ranked[0])
        if whole is not None:
            ranked[0] = whole
        return whole is not None

    def lowered(self, layout: RankedLayout) -> RankedLayout | None:
        """Return a layout with its schedule as it will run; None if it does not fit."""
        if layout.layout.schedule.is_lowered:
            return layout
        schedule = lowered_schedule(self.cache, layout.choice)
        whole = evaluate(self.cache, self.hardware, layout.config, layout.choice, schedule)
        if self._is_too_large(layout.choice, whole.peak_bytes):
            self.failed.add(layout.choice)
            return None
        return whole

    def _is_too_large(self, choice: Choice, needed: int) -> bool:
        if needed > self.room:
            self.too_large["at the peak of a step"].append((needed, choice))
        return needed > self.room

    def _drop(self, choice: Choice, waiting: list[_Estimate]) -> None:
        """Drop a layout that does not fit, and add the skipped choices,
        which shard or recompute more.
        """
        self.failed.add(choice)
        known = {each.choice for each in self.estimates}
        for each in self.skipped.pop(choice.shape, ()):
            estimate = self._estimate_of(each, estimate_bytes(self.cache, each))
            heapq.heappush(waiting, estimate)
            if each not in known:
                self.estimates.append(estimate)


def _postponed(estimates: Sequence[_Estimate]) -> list[_Estimate]:
    """Return the estimates, with most near-duplicates moved back:
    they get the slowest time of their tie.

    Of layouts of the same degrees that tie, the ``FASTEST`` and the ``SIMPLEST`` ones keep their
    place.
    """
    by_degrees: dict[tuple[int, ...], list[_Estimate]] = defaultdict(list)
    for each in sorted(estimates):
        by_degrees[each.choice.degrees].append(each)
    found: list[_Estimate] = []
    for left in by_degrees.values():
        while left:
            tied = [each for each in left if is_tie(left[0].seconds, each.seconds)]
            simple = sorted(tied, key=lambda each: complexity(each.choice))[:SIMPLEST]
            kept = {each.choice for each in (*tied[:FASTEST], *simple)}
            last = tied[-1].seconds
            found += [each if each.choice in kept else each._replace(seconds=last) for each in tied]
            left = left[len(tied) :]
    return found


def _is_skipped(choice: Choice, fitting: Sequence[Choice]) -> bool:
    """Check if a layout that shards or recomputes less, in equal groups, and so is never slower,
    fits.

    Layouts of ZeRO-3 with other units, or other weights that stay gathered, are compared by their
    time: the simplest of a tie is chosen.
    """
    return any(
        other.zero <= choice.zero
        and other.effort <= choice.effort
        and other.shard_factor == choice.shard_factor
        and (other.zero < 3 or other.gather_words == choice.gather_words)
        for other in fitting
    )
