"""All layouts of a model on a cluster: those that cannot be run with the rule and the number, the others by time.

degrees, batch, schedule, ZeRO stage, recompute        every combination that the rules allow     choices.py
  -> quick time and memory by formula                   all of them
  -> schedule drawn and simulated, memory walked        in that order, until the best are known
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

from meshwright.blueprint import batch_numbers
from meshwright.config import RunConfig
from meshwright.schedule.action import Schedule
from meshwright.terminal.format import format_size
from meshwright.tools.planner.choices import Choice, Rejection, choices, with_choice
from meshwright.tools.planner.cost import StepTime, step_time
from meshwright.tools.planner.estimates import (
    compute_schedule,
    least_bytes,
    least_host_bytes,
    lowered_schedule,
    quick_bytes,
    quick_s,
)
from meshwright.tools.planner.hardware import Hardware
from meshwright.tools.planner.layout_model import LayoutModel, ModelCache
from meshwright.tools.planner.memory import GLOO, NCCL, RankMemory, Transport
from meshwright.tools.planner.rates import FrameworkTraits, RateFractions

HEADROOM_SHARE = 0.08
"""Fraction of a device's usable memory that is left free for allocator fragmentation and kernel workspaces."""
BEST = 10
MOST_LOOKED_AT = 40
UNKNOWN_BYTES = 2**62
Shape: TypeAlias = tuple[int, int, int, str, int, int]
"""Type of ``Choice.shape``."""


@dataclass(frozen=True)
class RankedLayout:
    """A layout that fits."""

    choice: Choice
    config: RunConfig
    sketch: LayoutModel
    time: StepTime
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank; for a layout that was not drawn whole, only of ranks that may have the peak."""
    mfu: float
    """Model FLOPs (forward once, backward twice as much, full attention) over the peak of the dtype, 0..1."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest rank."""
        return max(each.total for each in self.memory)


@dataclass
class Plan:
    """Result of a search."""

    base: RunConfig
    hardware: Hardware
    nodes: int
    best: list[RankedLayout]
    """Best layouts, ordered by predicted time."""
    rejected: list[Rejection]
    num_choices: int
    """Number of layouts that the rules allow."""
    num_fitting: int
    """Number of those layouts that fit into memory by formula."""
    trade_off: list[tuple[float, int, Choice]] = field(default_factory=list)
    """(seconds, bytes, choice) of fitting layouts, by formula."""
    closest: tuple[int, Choice] | None = None
    """(bytes, choice) of the layout that needs the least memory, if nothing fits."""

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.hardware.devices_per_node


class _Quick(NamedTuple):
    """Estimate of a layout by formula, in the order in which layouts are evaluated."""

    seconds: float
    zero: int
    bytes: int
    choice: Choice


def transport_of(hardware: Hardware) -> Transport:
    """Return the transport of the hardware's communication backend: gloo on CPU, NCCL on GPUs."""
    return GLOO if hardware.kind == "cpu" else NCCL


def usable_bytes(hardware: Hardware) -> int:
    """Return the bytes of a device that a layout may use."""
    return int(hardware.usable_bytes * (1 - HEADROOM_SHARE))


def search(
    workbench: ModelCache,
    hardware: Hardware,
    nodes: int,
    *,
    best: int = BEST,
    offload: bool = False,
    reached: RateFractions | None = None,
    habits: FrameworkTraits | None = None,
) -> Plan:
    """Search all layouts of the workbench's model and batch on ``nodes`` nodes."""
    base = workbench.config
    hardware.check_dtype(base.train.dtype)
    plan = Plan(base, hardware, nodes, [], [], 0, 0)
    quick: list[_Quick] = []
    room = usable_bytes(hardware)
    too_large: dict[str, list[tuple[int, Choice]]] = defaultdict(list)
    tried: set[tuple[int, int, int, int]] = set()
    fits: set[tuple[int, int, int, int]] = set()
    spared: dict[Shape, list[Choice]] = defaultdict(list)
    """Choices not evaluated because one that shards or recomputes less, and so is never slower, fits by formula."""
    all_of_them = choices(workbench, hardware, nodes, offload=offload)
    for rejected, group in groupby(all_of_them, key=lambda each: each if isinstance(each, Rejection) else each.shape):
        if isinstance(rejected, Rejection):
            plan.rejected += [each for each in group if isinstance(each, Rejection)]
            continue
        alike = [each for each in group if isinstance(each, Choice)]
        plan.num_choices += len(alike)
        first = alike[0]
        if offload and (hosted := least_host_bytes(workbench, alike) * hardware.devices_per_node) > (
            hardware.host_memory_bytes
        ):
            needs = f"{format_size(hosted)} of a node's host, which has {format_size(hardware.host_memory_bytes)}"
            plan.rejected.append(Rejection(f"memory, the optimizer on the host: {needs}", str(first), len(alike)))
            continue
        smaller = (first.pp, first.dp, first.tp, first.micro_batch_size // 2)
        tried.add((first.pp, first.dp, first.tp, first.micro_batch_size))
        if smaller in tried and smaller not in fits:
            too_large["with half the samples in a micro-batch already"] += [(UNKNOWN_BYTES, each) for each in alike]
            continue
        for each, needed in _that_fit(workbench, alike, room, too_large):
            fits.add((each.pp, each.dp, each.tp, each.micro_batch_size))
            plan.num_fitting += 1
            if needed is None:
                spared[each.shape].append(each)
                continue
            seconds = quick_s(workbench, hardware, each, reached, habits)
            quick.append(_Quick(seconds, each.zero, needed, each))
    contest = _Contest(workbench, hardware, room, quick, spared, too_large, reached, habits)
    plan.best = contest.best(best)
    plan.num_fitting -= len(contest.failed)
    plan.trade_off = [(each.seconds, each.bytes, each.choice) for each in quick if each.choice not in contest.failed]
    plan.rejected += _too_large(too_large, room)
    if not plan.best and too_large:
        plan.closest = min(chain.from_iterable(too_large.values()), key=lambda each: each[0])
    return plan


@dataclass
class _Contest:
    """Ranking of the layouts that fit by formula: timed from their schedules; the first also drawn as it will run."""

    workbench: ModelCache
    hardware: Hardware
    room: int
    estimates: list[_Quick]
    """Estimates by formula; spared choices are added when a faster one turns out not to fit."""
    spared: dict[Shape, list[Choice]]
    too_large: dict[str, list[tuple[int, Choice]]]
    reached: RateFractions | None
    habits: FrameworkTraits | None
    failed: set[Choice] = field(default_factory=set)

    def best(self, number: int) -> list[RankedLayout]:
        """Return up to ``number`` layouts that fit, ordered by time."""
        waiting = sorted(self.estimates)
        found: list[RankedLayout] = []
        fitting: dict[Shape, list[Choice]] = defaultdict(list)
        looked_at = 0
        while True:
            slowest = found[number - 1].time.total if len(found) >= number else math.inf
            if waiting and waiting[0].seconds <= slowest and (looked_at < MOST_LOOKED_AT or not found):
                choice = heapq.heappop(waiting).choice
                if _is_spared(choice, fitting[choice.shape]):
                    self.spared[choice.shape].append(choice)
                elif each := self._look(choice):
                    looked_at += 1
                    fitting[choice.shape].append(choice)
                    insort(found, each, key=lambda each: each.time.total)
                else:
                    self._give_way(choice, waiting)
            elif not found or self._first_fits(found):
                break
            else:
                first = found.pop(0).choice
                fitting[first.shape].remove(first)
                self._give_way(first, waiting)
        return found[:number]

    def _look(self, choice: Choice) -> RankedLayout | None:
        """Evaluate a layout: time from its computations, memory from a walk with approximate message positions.

        Returns None if it does not fit.
        """
        config = with_choice(self.workbench.config, choice)
        sketch = self.workbench.sketch(config, compute_schedule(self.workbench, choice))
        memory = tuple(sketch.memory(rank, transport_of(self.hardware)) for rank in sketch.unlike_ranks())
        needed = max(each.total for each in memory)
        if needed > self.room:
            self.too_large["at the highest point of a step"].append((needed, choice))
            return None
        time = step_time(sketch, self.hardware, self.reached, self.habits)
        return _found(self.workbench, self.hardware, choice, sketch, time, memory)

    def _first_fits(self, found: list[RankedLayout]) -> bool:
        """Draw the fastest layout as it will run, and replace its estimate if it still fits."""
        choice, config = found[0].choice, found[0].config
        if found[0].sketch.schedule.is_lowered:
            return True
        schedule = lowered_schedule(self.workbench, choice)
        whole = examine(self.workbench, self.hardware, config, choice, schedule, self.reached, self.habits)
        if whole.peak_bytes > self.room:
            self.too_large["at the highest point of a step"].append((whole.peak_bytes, choice))
            return False
        found[0] = whole
        return True

    def _give_way(self, choice: Choice, waiting: list[_Quick]) -> None:
        """Drop a layout that does not fit, and add the choices that it spared, which shard or recompute more."""
        self.failed.add(choice)
        known = {each.choice for each in self.estimates}
        for each in self.spared.pop(choice.shape, ()):
            seconds = quick_s(self.workbench, self.hardware, each, self.reached, self.habits)
            estimate = _Quick(seconds, each.zero, quick_bytes(self.workbench, each), each)
            heapq.heappush(waiting, estimate)
            if each not in known:
                self.estimates.append(estimate)


def _is_spared(choice: Choice, fitting: Sequence[Choice]) -> bool:
    """Check if a layout that shards or recomputes less, and so is never slower, fits."""
    return any(other.zero <= choice.zero and other.effort <= choice.effort for other in fitting)


def _too_large(found: dict[str, list[tuple[int, Choice]]], room: int) -> Iterator[Rejection]:
    for why, large in found.items():
        least, choice = min(large, key=lambda each: each[0])
        closest = f" (the closest by {format_size(least - room)})" if least < UNKNOWN_BYTES else ""
        rule = f"memory, {why}: more than the {format_size(room)} of a device that may be used{closest}"
        yield Rejection(rule, str(choice), len(large))


def _that_fit(
    workbench: ModelCache, alike: Sequence[Choice], room: int, too_large: dict[str, list[tuple[int, Choice]]]
) -> Iterator[tuple[Choice, int | None]]:
    """Yield the choices that fit, out of those that differ only in sharding and recompute.

    Each comes with its bytes, or with None if a fitting one shards and recomputes less, and so is never slower.
    """
    least = max(alike, key=lambda each: (each.zero, each.recompute == "full", each.shard_factor))
    at_rest = least_bytes(workbench, least)
    if at_rest > room:
        too_large["weights, gradients and optimizer alone"] += [(at_rest, least)] * len(alike)
        return
    needed = quick_bytes(workbench, least)
    if needed > room:
        too_large["activations besides"] += [(needed, least)] * len(alike)
        return
    fitting: list[Choice] = []
    for each in alike:
        if _is_spared(each, fitting):
            yield each, None
            continue
        needed = quick_bytes(workbench, each)
        if needed > room:
            too_large["activations besides"].append((needed, each))
            continue
        fitting.append(each)
        yield each, needed


def examine(
    workbench: ModelCache,
    hardware: Hardware,
    config: RunConfig,
    choice: Choice,
    schedule: Schedule | None = None,
    reached: RateFractions | None = None,
    habits: FrameworkTraits | None = None,
) -> RankedLayout:
    """Evaluate a configuration as it stands."""
    hardware.check_dtype(config.train.dtype)
    sketch = workbench.sketch(config, schedule)
    memory = tuple(sketch.memory(rank, transport_of(hardware)) for rank in range(sketch.schedule.pp))
    return _found(workbench, hardware, choice, sketch, step_time(sketch, hardware, reached, habits), memory)


def _found(
    workbench: ModelCache,
    hardware: Hardware,
    choice: Choice,
    sketch: LayoutModel,
    time: StepTime,
    memory: tuple[RankMemory, ...],
) -> RankedLayout:
    flops = workbench.flops_per_step(sketch.config)
    size = choice.tp * choice.pp * choice.dp
    mfu = flops / time.total / (size * hardware.flops_per_s[sketch.config.train.dtype])
    return RankedLayout(choice, sketch.config, sketch, time, memory, mfu)


def tokens_per_second(found: RankedLayout, workbench: ModelCache) -> float:
    """Return the throughput of all devices together, in tokens/s."""
    batch = batch_numbers(found.config)
    return batch.global_batch * workbench.example(1).tokens_per_sample / found.time.total
