"""Comparison of one layout with the first of a plan: seconds by cause, memory,
place among the best.
"""

from __future__ import annotations

from meshwright.config import RunConfig
from meshwright.errors import UserError
from meshwright.terminal.format import format_size, format_table
from meshwright_plan.planner.choice import Pins, choice_of
from meshwright_plan.planner.estimates import lowered_schedule
from meshwright_plan.planner.explanation import duration, parts, signed_duration
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.nearest import search_with_offload
from meshwright_plan.planner.plan import Plan, RankedLayout, evaluate, usable_bytes
from meshwright_plan.planner.ranking import TIE_SHARE, complexity, is_tie
from meshwright_plan.planner.requirements import check_requirements

MAX_RULES = 5


def compare(first: RankedLayout, other: RankedLayout, name: str) -> list[str]:
    """Format the seconds of two layouts by cause, one line per cause that matters,
    and their memory.
    """
    ours, theirs = parts(first), parts(other)
    rows: list[tuple[str, ...]] = [("", "first", name, "difference")]
    for cause, seconds in ours.items():
        if max(seconds, theirs[cause]) > 0.001 * first.time.total:
            rows.append((cause, *_three(seconds, theirs[cause])))
    rows.append(("step", *_three(first.time.total, other.time.total)))
    peaks = (first.peak_bytes, other.peak_bytes)
    rows.append(("memory", *map(format_size, peaks), f"{peaks[1] / peaks[0] - 1:+.0%}"))
    return format_table(rows, "<>>>")


def _three(a: float, b: float) -> tuple[str, str, str]:
    return duration(a, 3), duration(b, 3), signed_duration(b - a)


def verdict(first: RankedLayout, other: RankedLayout) -> str:
    """Return one sentence on the difference: a lead, a tie,
    or a tie that the simpler layout won.
    """
    ratio = other.time.total / first.time.total
    if not is_tie(first.time.total, other.time.total):
        return (
            f"{ratio - 1:.1%} slower than the first"
            if ratio > 1
            else f"{1 - ratio:.1%} faster than the first"
        )
    text = f"a tie with the first: {ratio - 1:+.1%}, below {TIE_SHARE:.0%}"
    return text + (
        "; the first is simpler" if complexity(first.choice) < complexity(other.choice) else ""
    )


def why_not(cache: ModelCache, plan: Plan, wanted: Pins) -> list[str]:
    """Compare the best layout that has the ``wanted`` fields with the plan's first; without one,
    list broken rules.
    """
    asked = " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in wanted.items()
    )
    held = cache.replaced(pins={**cache.pins, **wanted})
    try:
        found = search_with_offload(held, plan.hardware, plan.nodes, 1)
    except UserError as error:  # such as a schedule of another number of stages
        return [f"no layout with {asked} works", f"  {error.message.splitlines()[0]}"]
    if found.best:
        other = found.best[0]
        said = f"the best with {asked}: {other.choice}: {verdict(plan.best[0], other)}"
        return [said, *compare(plan.best[0], other, "with it")]
    rules = found.rejections_by_rule().most_common(MAX_RULES)
    return [
        f"no layout with {asked} works",
        *(f"  {rule}" for rule, _ in rules),
        *([] if rules else ["  no layout of the search has these values"]),
    ]


def own_layout(cache: ModelCache, plan: Plan, config: RunConfig) -> list[str]:
    """Compare the layout of the user's own resolved configuration with the first."""
    choice = choice_of(config)
    listed = next((at for at, each in enumerate(plan.best, start=1) if each.choice == choice), None)
    if listed is not None:
        return [f"your own layout is number {listed}: {choice}"]
    try:
        check_requirements(cache, config)
        schedule = None if config.pipeline.schedule_file else lowered_schedule(cache, choice)
        own = evaluate(cache, plan.hardware, config, choice, schedule)
    except UserError as error:
        return [f"your own layout, {choice}, cannot run: {error.message.splitlines()[0]}"]
    place = 1 + sum(each.time.total < own.time.total for each in plan.best)
    room = usable_bytes(plan.hardware)
    at = (
        f"number {place} by time"
        if place <= len(plan.best)
        else f"behind the {len(plan.best)} above"
    )
    over = (
        f", and does not fit: {format_size(own.peak_bytes)} of {format_size(room)}"
        if own.peak_bytes > room
        else ""
    )
    said = f"your own layout, {choice}, would be {at}{over}: {verdict(plan.best[0], own)}"
    return [said, *compare(plan.best[0], own, "yours")]
