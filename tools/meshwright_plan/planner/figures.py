"""Figures of a plan, for a page or a file: memory of each rank, time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright_plan.planner.explanation import duration
from meshwright_plan.planner.memory.rank import CATEGORIES, RankMemory
from meshwright_plan.planner.plan import Plan, usable_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CATEGORY_COLOURS = ("#4c78a8", "#9ecae9", "#54a24b", "#f2a33c", "#b279a2", "#bab0ac")
"""Colours of the memory categories, in their order."""
COLOURS = ("#4c78a8", "#e07b39", "#54a24b", "#b279a2", "#2aa198", "#9c755f")
"""Colours of dots: mid-tones that stand out in light mode and, inverted, in dark mode."""
LIMIT_COLOUR = "#c44e52"
MAX_BARS = 64
MIN_BARS = 8
"""Smallest number of bars for which the axis has space, so that a single bar is not too wide."""
NEAR = 24
"""Distance in pixels below which the numbers of two points would overlap."""
FAR = 6
"""Ratio of room to peak memory above which the room is text, not a line,
to keep the rest readable.
"""


def _unit(most: int) -> tuple[str, int]:
    """Return a readable (name, bytes) unit for this many bytes."""
    return next(
        ((name, size) for name, size in (("GiB", 2**30), ("MiB", 2**20)) if most >= size),
        ("KiB", 2**10),
    )


def memory_bars(memory: Sequence[RankMemory], room: int) -> Figure:
    """Draw a stacked memory bar for each pipeline rank, and a line at ``room``,
    a device's usable bytes.
    """
    shown = list(enumerate(memory))
    if len(shown) > MAX_BARS:
        shown = [*shown[: MAX_BARS // 2], *shown[-MAX_BARS // 2 :]]
    drawn, axes = _new_figure(3.2)
    fullest = max(each.total for each in memory)
    unit, size = _unit(fullest)
    below = [0.0] * len(shown)
    labels = [str(rank) for rank, _ in shown]
    for category, colour in zip(CATEGORIES, CATEGORY_COLOURS, strict=True):
        parts = [getattr(each, category) / size for _, each in shown]
        axes.bar(labels, parts, bottom=below, color=colour, label=category, width=0.8)
        below = [a + b for a, b in zip(below, parts, strict=True)]
    if not _title_far_limit(axes, room, fullest):
        axes.axhline(room / size, color=LIMIT_COLOUR, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"room {room / size:.3g} {unit}",
            (1, room / size),
            xycoords=("axes fraction", "data"),
            color=LIMIT_COLOUR,
            va="bottom",
            ha="right",
            fontsize=9,
        )
        axes.set_ylim(top=1.1 * max(room / size, *below))
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel(f"{unit} at the peak")
    axes.set_xlim(-0.6, max(len(shown), MIN_BARS) - 0.4)
    if len(shown) > 20:
        axes.set_xticks(range(0, len(shown), max(1, len(shown) // 16)))
    drawn.legend(loc="outside upper center", ncols=7, frameon=False, fontsize=9)
    return drawn


def trade_off(plan: Plan) -> Figure:
    """Plot step time against memory, one point per layout that fits; the best ones are numbered."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    drawn, axes = _new_figure(4.2)
    fullest = max(
        [*(needed for _, needed, _ in plan.trade_off), *(layout.peak_bytes for layout in plan.best)]
    )
    unit, size = _unit(fullest)
    tps = sorted({choice.tp for _, _, choice in plan.trade_off})
    for index, tp in enumerate(tps):
        points = [
            (needed / size, seconds)
            for seconds, needed, choice in plan.trade_off
            if choice.tp == tp
        ]
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.scatter(x, y, s=9, color=COLOURS[index % len(COLOURS)], label=f"tp {tp}", alpha=0.8)
    room = usable_bytes(plan.hardware)
    if not _title_far_limit(axes, room, fullest):
        axes.axvline(room / size, color=LIMIT_COLOUR, linewidth=1, linestyle="--")
        axes.annotate(
            f"room {room / size:.3g} {unit}",
            (room / size, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            color=LIMIT_COLOUR,
            va="top",
            ha="right",
            rotation=90,
            fontsize=9,
        )
    axes.margins(y=0.12)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    _number(drawn, axes, [(layout.peak_bytes / size, layout.time.total) for layout in plan.best])
    axes.set_xlabel(f"{unit} of the fullest rank")
    axes.set_ylabel("time of a step")
    drawn.legend(loc="outside upper center", ncols=7, frameon=False, fontsize=9)
    return drawn


def _new_figure(height: float) -> tuple[Figure, Axes]:
    """Return a figure of this height in inches, and its axes without the upper and right border."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, height), layout="constrained")
    axes = drawn.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def _title_far_limit(axes: Axes, room: int, fullest: int) -> bool:
    """Write a memory limit far above the peak into the title instead of a line;
    return False for any other limit.
    """
    if room <= FAR * fullest:
        return False
    unit, size = _unit(room)
    axes.set_title(
        f"room {room / size:.3g} {unit}, far beyond", loc="right", color=LIMIT_COLOUR, fontsize=9
    )
    return True


def _number(drawn: Figure, axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw a ring and a number at each point;
    close points share one label below the lowest of them.
    """
    x, y = zip(*points, strict=True)
    axes.scatter(x, y, s=42, facecolor="none", edgecolor=LIMIT_COLOUR, linewidth=1.2)
    drawn.draw_without_rendering()
    placed: list[tuple[float, float, list[int]]] = []
    for number, point in enumerate(points, start=1):
        a, b = axes.transData.transform(point)
        near = next(
            (each for each in placed if abs(each[0] - a) < NEAR and abs(each[1] - b) < NEAR), None
        )
        if near is None:
            placed.append((a, b, [number]))
        else:
            near[2].append(number)
    for *_, numbers in placed:
        axes.annotate(
            _ranges(numbers),
            min((points[number - 1] for number in numbers), key=lambda point: point[1]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=LIMIT_COLOUR,
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers with ranges: 1 2 3 5 -> ``1-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
