"""Sweep: the best layout for each of several numbers of nodes and global batches, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.terminal.format import format_table
from meshwright_plan.planner.explanation import duration
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.nearest import search_with_offload
from meshwright_plan.planner.plan import RankedLayout, tokens_per_second

TOKENS = 1e12
"""Number of tokens whose cost is computed."""


class SweepPoint(NamedTuple):
    """Best layout for one number of nodes and one global batch."""

    devices: int
    nodes: int
    global_batch: int
    layout: RankedLayout | None
    """None if no layout keeps the rules and fits."""
    tokens_per_s: float
    reason: str = ""
    """Reason why there is no layout."""

    @property
    def device_hours(self) -> float:
        """Device hours per 10^12 tokens."""
        return self.devices * TOKENS / self.tokens_per_s / 3600


def sweep(
    cache: ModelCache, hardware: Hardware, nodes: Sequence[int], batches: Sequence[int]
) -> list[SweepPoint]:
    """Search the best layout for each combination, batches outermost."""
    return [
        _point(_with_samples(cache, batch), hardware, number)
        for batch in batches
        for number in nodes
    ]


def _with_samples(cache: ModelCache, samples: int) -> ModelCache:
    """Return the cache for another global batch, without a ramp."""
    if samples == cache.config.batch.global_batch:
        return cache
    config = cache.config.replace(batch={"chunks": samples, "global_batch": samples, "ramp": None})
    return cache.replaced(config=config, results=dict(cache.results))


def _point(cache: ModelCache, hardware: Hardware, nodes: int) -> SweepPoint:
    found, batch = (
        search_with_offload(cache, hardware, nodes, 1, settles=True),
        cache.config.batch.global_batch or 1,
    )
    devices = nodes * hardware.devices_per_node
    if found.best:
        return SweepPoint(
            devices, nodes, batch, found.best[0], tokens_per_second(found.best[0], cache)
        )
    rules = found.rejections_by_rule().most_common(1)
    return SweepPoint(
        devices, nodes, batch, None, 0.0, rules[0][0] if rules else "no degrees divide the devices"
    )


def sweep_table(points: Sequence[SweepPoint], device_hour: float | None, share: float) -> list[str]:
    """Format one line per point. ``share``: mean error of predicted times."""
    cost = "device-hours" if device_hour is None else "cost"
    rows = [
        ("nodes", "devices", "batch", "step", "MFU", "tokens/s", f"{cost} / 10^12 tokens", "layout")
    ]
    for each in points:
        head = (f"{each.nodes:,}", f"{each.devices:,}", f"{each.global_batch:,}")
        if each.layout is None:
            rows.append((*head, "-", "-", "-", "-", f"none: {each.reason}"))
            continue
        seconds = each.layout.time.total
        price = each.device_hours * (device_hour or 1.0)
        figures = (
            f"{duration(seconds)} ±{share:.1%}",
            f"{each.layout.mfu:.1%}",
            f"{each.tokens_per_s:,.0f}",
        )
        rows.append((*head, *figures, f"{price:,.0f}", str(each.layout.choice)))
    return format_table(rows, ">>>>>>><")
