"""Text form of a plan: the best layouts, the first one's lead over the second, memory per rank,
rejected layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.mesh import draw_placement, nodes_of
from meshwright.schedule.drawing import text as schedule_text
from meshwright.terminal.format import format_size, format_table
from meshwright_plan.planner.context import context_words
from meshwright_plan.planner.explanation import strategy, why
from meshwright_plan.planner.load import room_for_skew
from meshwright_plan.planner.memory.rank import CATEGORIES
from meshwright_plan.planner.mirror import MirrorLinks, mirror_lines
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import (
    HEADROOM_SHARE,
    Plan,
    RankedLayout,
    tokens_per_second,
    usable_bytes,
)
from meshwright_plan.planner.ranking import TIE_SHARE
from meshwright_plan.planner.row_work import row_lines

MAX_RULES = 14
WIDTH = 110


def describe(cache: ModelCache, plan: Plan, held: Sequence[str] = ()) -> str:
    """Return a plan as text. ``held``: options with the values that every layout has."""
    config, hardware = plan.base, plan.hardware
    lines = [
        f"model      {config.model.builder}, {len(cache.names)} layers, {config.train.dtype}",
        (
            f"cluster    {plan.nodes:,} x {hardware.devices_per_node} = {plan.size:,} x"
            f" {hardware.name}, {format_size(hardware.memory_bytes)} each, of which"
            f" {format_size(usable_bytes(hardware))} may be used ({HEADROOM_SHARE:.0%} left free)"
        ),
        (
            f"batch      {config.batch.global_batch:,} samples of"
            f" {cache.example(1).tokens_per_sample:,} {cache.example(1).unit}"
        ),
        *(
            f"{'strategy' if i == 0 else '':10} {line}"
            for i, line in enumerate(strategy(cache, plan))
        ),
        f"search     {plan.num_choices:,} legal layouts"
        + (f" with {' '.join(held)}" if held else "")
        + f", {plan.num_fitting:,} of them fit",
        "",
        *rejections(plan),
    ]
    if not plan.best:
        return "\n".join([*lines, "", "no layout fits"])
    first = plan.best[0]
    lines += ["", *table(cache, plan.best, plan), *notes(plan)]
    of_rows = row_lines(cache, hardware, first)
    lines += [f"{'' if at else 'rows':10} {line}" for at, line in enumerate(of_rows)]
    lines += [""]
    if len(plan.best) > 1:
        lines += [why(first, plan.best[1]), ""]
    lines += [
        draw_placement(first.layout.grid, nodes_of(plan.nodes, hardware.devices_per_node)),
        "",
    ]
    lines += [
        "peak memory of each rank in the first layout",
        *memory_table(first),
    ]
    lines += room_for_skew(cache, plan.hardware, first)
    lines += [f"{'' if at else 'mirror':10} {line}" for at, line in enumerate(of_mirror(plan))]
    if 1 < first.choice.pp <= 16:
        lines += ["", *schedule_text(first.time.timeline, WIDTH).splitlines()]
    return "\n".join(lines)


def table(cache: ModelCache, layouts: Sequence[RankedLayout], plan: Plan) -> list[str]:
    """Format one line per layout, with the error bar of its time and the number
    of its near-duplicates.
    """
    share = plan.error.share
    shown = {
        axis for axis in ("cp", "ep") if any(getattr(each.choice, axis) > 1 for each in layouts)
    }
    degrees = [
        axis for axis in ("pp", "dp", "cp", "tp", "ep") if axis not in ("cp", "ep") or axis in shown
    ]
    contexts = ["exchange"] if "cp" in shown else []
    rows: list[tuple[str, ...]] = [
        (
            "",
            "step s",
            "MFU",
            "tokens/s",
            "memory",
            *degrees,
            *contexts,
            "schedule",
            "batch",
            "ZeRO",
            "sp",
            "recompute",
        )
    ]
    if plan.alike:
        rows[0] += ("alike",)
    for number, each in enumerate(layouts, start=1):
        c = each.choice
        schedule = (
            "-"
            if c.pp == 1
            else c.schedule + (f" x{c.interleave}" if c.schedule == "interleaved_1f1b" else "")
        )
        zero = str(c.zero) + (
            f"/{c.shard_factor}" if c.zero and c.shard_factor < c.num_replicas else ""
        )
        rows.append(
            (
                str(number),
                f"{each.time.total:.4g} ±{each.time.total * share:.2g}",
                f"{each.mfu:.1%}",
                f"{tokens_per_second(each, cache):,.0f}",
                format_size(each.peak_bytes),
                *(str(getattr(c, axis)) for axis in degrees),
                *[context_words(c.exchange, c.order) or ("keys" if c.cp > 1 else "-")]
                * len(contexts),
                schedule,
                f"{c.micro_batch_size} x {c.chunks}",
                " ".join([zero, *c.gather_words, *(["offload"] if c.offload else [])]),
                "yes" if c.sequence else "-",
                c.recompute if c.recompute != "none" else "-",
                *(
                    [f"+{len(plan.alike.get(c, ()))}" if c in plan.alike else ""]
                    if plan.alike
                    else []
                ),
            )
        )
    sides = ">" * (5 + len(degrees)) + "<" * len(contexts) + "<><<<>"
    return format_table(rows, sides[: len(rows[0])])


def notes(plan: Plan) -> list[str]:
    """Explain the error bars, and the near-duplicates and the tie of a settled plan."""
    lines = [f"±{plan.error.share:.1%}: {plan.error.text} (docs/planner-accuracy.md)"]
    if plan.alike:
        lines.append(
            f"alike: more layouts of these degrees within {TIE_SHARE:.0%}, of which the simplest is"
            " shown"
        )
    first, fastest = plan.best[0], min(plan.best, key=lambda each: each.time.total)
    if first is not fastest:
        lines.append(
            f"the first is the simplest of a tie, within {TIE_SHARE:.0%} of the fastest:"
            f" {fastest.choice}"
        )
    return lines


def of_mirror(plan: Plan) -> list[str]:
    """Return the lines on the mirror in host memory of the first layout; none without
    ``watch.mirror``.
    """
    first = plan.best[0]
    if not first.config.watch.mirror:
        return []
    nodes = nodes_of(plan.nodes, plan.hardware.devices_per_node)
    links = MirrorLinks.of(plan.hardware)
    return mirror_lines(draw_blueprint(first.config), nodes, links, first.time.total)


def memory_rows(layout: RankedLayout) -> list[tuple[str, ...]]:
    """Format the memory of each pipeline rank as one row: bytes by category, their sum,
    the action at the peak.
    """
    return [
        (
            str(rank),
            *(format_size(getattr(each, name)) for name in CATEGORIES),
            format_size(each.total),
            each.at,
        )
        for rank, each in enumerate(layout.memory)
    ]


def memory_table(layout: RankedLayout) -> list[str]:
    """Format one line per pipeline rank; with more than nine ranks,
    only the first and last four.
    """
    rows = memory_rows(layout)
    shown = rows if len(rows) <= 9 else [*rows[:4], *rows[-4:]]
    lines = format_table([("pp_rank", *CATEGORIES, "total", "at"), *shown], ">>>>>>>><")
    if len(rows) > len(shown):
        lines.insert(5, f"... {len(rows) - len(shown)} more between")
    host_bytes = max(each.host for each in layout.memory)
    return [*lines, f"and {format_size(host_bytes)} in the host's memory"] if host_bytes else lines


def rejections(plan: Plan) -> list[str]:
    """List the broken rules, most frequent first, each with an example."""
    times = plan.rejections_by_rule()
    if not times:
        return []
    # the first example of each rule
    examples = {each.rule: each.example for each in reversed(plan.rejected)}
    lines = [
        f"  {f'{number:,} x':>8}  {rule}; such as {examples[rule]}"
        for rule, number in times.most_common(MAX_RULES)
    ]
    left = len(times) - len(lines)
    return ["rejected", *lines, *([f"  and by {left} more rules"] if left > 0 else [])]


def chosen_config(plan: Plan, name: str) -> RunConfig:
    """Return the best layout as a configuration for `meshwright train`."""
    return plan.best[0].config.replace(run={"name": name}, launch={"processes": "auto"})
