"""Plan: the layouts of a model on a cluster that fit, by time,
and the reasons against the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from meshwright.config import RunConfig, batch_numbers
from meshwright.schedule.action import Schedule
from meshwright_plan.planner.choice import Choice, Rejection
from meshwright_plan.planner.cost import StepTime, step_time
from meshwright_plan.planner.error_bars import ErrorBar
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.memory.rank import RankMemory
from meshwright_plan.planner.memory.reduction import GLOO, NCCL, Backend
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.rates import PerformanceModel

HEADROOM_SHARE = 0.08
"""Fraction of a device's usable memory that is left free for allocator fragmentation
and kernel workspaces.
"""


@dataclass(frozen=True)
class RankedLayout:
    """Layout with its predicted step time and memory."""

    choice: Choice
    config: RunConfig
    layout: LayoutModel
    time: StepTime
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank; before the schedule is lowered,
    only of ranks that may have the peak.
    """
    mfu: float
    """Model FLOPs (forward once, backward twice as much, full attention)
    over the peak of the dtype, 0..1.
    """

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
    """Best layouts, ordered by predicted time; in a settled plan,
    the simplest that ties with the fastest is first.
    """
    rejected: list[Rejection]
    num_choices: int
    """Number of layouts that the rules allow."""
    num_fitting: int
    """Number of those layouts that fit into memory by formula."""
    error: ErrorBar
    """Error bar of the predicted times."""
    trade_off: list[tuple[float, int, Choice]] = field(default_factory=list)
    """(seconds, bytes, choice) of fitting layouts, by formula."""
    closest: tuple[int, Choice] | None = None
    """(bytes, choice) of the layout that needs the least memory, if nothing fits."""
    alike: dict[Choice, tuple[Choice, ...]] = field(default_factory=dict)
    """Near-duplicates of each of the best layouts, in a settled plan."""

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.hardware.devices_per_node

    def rejections_by_rule(self) -> Counter[str]:
        """Count the rejected layouts by the rule that they break."""
        times: Counter[str] = Counter()
        for each in self.rejected:
            times[each.rule] += each.times
        return times


def backend_of(hardware: Hardware) -> Backend:
    """Return the communication backend of the hardware: gloo on CPU, NCCL on GPUs."""
    return GLOO if hardware.kind == "cpu" else NCCL


def usable_bytes(hardware: Hardware) -> int:
    """Return the bytes of a device that a layout may use."""
    return int(hardware.usable_bytes * (1 - HEADROOM_SHARE))


def evaluate(
    cache: ModelCache,
    hardware: Hardware,
    config: RunConfig,
    choice: Choice,
    schedule: Schedule | None = None,
) -> RankedLayout:
    """Return the predicted time and memory of a configuration, whether it fits or not."""
    hardware.check_dtype(config.train.dtype)
    layout = cache.layout(config, schedule)
    memory = tuple(layout.memory(rank, backend_of(hardware)) for rank in range(layout.schedule.pp))
    return ranked_layout(cache, PerformanceModel.of(hardware), choice, layout, memory)


def ranked_layout(
    cache: ModelCache,
    performance: PerformanceModel,
    choice: Choice,
    layout: LayoutModel,
    memory: tuple[RankMemory, ...],
) -> RankedLayout:
    """Time a layout whose memory is known."""
    time = step_time(layout, performance)
    peak_flops_per_s = (
        layout.grid.size * performance.hardware.flops_per_s[layout.config.train.dtype]
    )
    mfu = cache.flops_per_step(layout.config) / time.total / peak_flops_per_s
    return RankedLayout(choice, layout.config, layout, time, memory, mfu)


def tokens_per_second(layout: RankedLayout, cache: ModelCache) -> float:
    """Return the throughput of all devices together, in tokens/s."""
    batch = batch_numbers(layout.config.batch)
    return batch.global_batch * cache.example(1).tokens_per_sample / layout.time.total
