"""HTML page of a plan: one self-contained file, no network,
readable on a phone and in dark mode.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.mesh import nodes_of
from meshwright.terminal.format import format_size
from meshwright_plan.page.placement import placement_cards
from meshwright_plan.page.render import render, svg_of
from meshwright_plan.picture.figure import figure
from meshwright_plan.picture.panel import Panel, Unit
from meshwright_plan.planner.explanation import duration, strategy, why
from meshwright_plan.planner.figures import memory_bars, trade_off
from meshwright_plan.planner.memory.rank import CATEGORIES
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import Plan, tokens_per_second, usable_bytes
from meshwright_plan.planner.row_work import row_lines
from meshwright_plan.planner.text import memory_rows, notes, of_mirror

TEMPLATE = Path(__file__).parent / "templates" / "plan.html.j2"
MAX_DRAWN = 4096
"""Most actions of a schedule that is drawn."""


def page(cache: ModelCache, plan: Plan) -> str:
    """Return the page as HTML text. The plan must have at least one layout that fits."""
    first, room = plan.best[0], usable_bytes(plan.hardware)
    timeline, share = first.time.timeline, plan.error.share
    of_rows = row_lines(cache, plan.hardware, first)
    return render(
        TEMPLATE,
        title=f"{plan.base.run.name} on {plan.size:,} x {plan.hardware.name}",
        plan=plan,
        first=first,
        facts=[
            (
                "model",
                f"{plan.base.model.builder}, {len(cache.names)} layers, {plan.base.train.dtype}",
            ),
            ("step", f"{duration(first.time.total)} ± {share:.1%} predicted, {first.mfu:.1%} MFU"),
            ("rate", f"{tokens_per_second(first, cache):,.0f} {cache.example(1).unit} a second"),
            (
                "memory",
                f"{format_size(first.peak_bytes)} of {format_size(room)} on the fullest rank",
            ),
        ],
        layout=str(first.choice),
        strategy=strategy(cache, plan),
        rows=_rows(cache, plan),
        why=why(first, plan.best[1]) if len(plan.best) > 1 else "",
        notes=[
            *notes(plan),
            *([f"rows: {' '.join(of_rows)}"] if of_rows else []),
            *([f"mirror: {' '.join(of_mirror(plan))}"] if of_mirror(plan) else []),
        ],
        categories=CATEGORIES,
        memory=memory_rows(first),
        memory_svg=svg_of(memory_bars(first.memory, room), "memory of each rank, by category"),
        trade_off_svg=svg_of(trade_off(plan), "time of a step against memory"),
        schedule_svg=(
            svg_of(figure([Panel(timeline)], Unit.SECONDS), "the schedule, simulated")
            if first.choice.pp > 1 and len(timeline.spans) <= MAX_DRAWN
            else ""
        ),
        shades=first.choice.interleave > 1,
        placement=placement_cards(
            first.layout.grid, nodes_of(plan.nodes, plan.hardware.devices_per_node)
        ),
        rejected=plan.rejections_by_rule().most_common(),
    )


def _rows(cache: ModelCache, plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            str(number),
            (f"{duration(each.time.total)} ± {duration(each.time.total * plan.error.share, 2)}"),
            f"{each.mfu:.1%}",
            format_size(each.peak_bytes),
            f"{each.time.bubble_share:.1%}",
            str(each.choice)
            + (f" (+{len(plan.alike[each.choice])} alike)" if each.choice in plan.alike else ""),
        )
        for number, each in enumerate(plan.best, start=1)
    ]
