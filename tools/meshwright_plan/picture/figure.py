"""Figure of a timeline for a paper, SVG or PNG: a row per rank, a box per computation,
idle time blank.

    caption      1f1b pp=4 chunks=8: bubble 27.3 % of total time; activations in flight 4 3 2 1
    rank 0      [0][1][2][3]          [  0  ][4][  1  ] ...
    rank 1         [0][1][2]    [  0  ][3][  1  ] ...
                |------|------|------|      time (ticks) or (ms)
    legend       forward  backward ...      a kind with several stages on a rank has a shade for each

Several panels share one time axis (a measured step above its simulation). A long run is reduced to
its first and last columns, with a gap between them; many ranks are reduced to the first and the
last. matplotlib is imported only inside the functions that draw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from meshwright.schedule.action import COMPUTE, Action, Kind
from meshwright.schedule.analysis import Span, Timeline
from meshwright.schedule.captions import caption, typical_shortest
from meshwright_plan.picture.axis import TimeAxis, time_axis, unit_of_seconds
from meshwright_plan.picture.legend import LINE, READINGS, add_legend, entries_of, lines_of
from meshwright_plan.picture.library import require_matplotlib
from meshwright_plan.picture.palette import (
    COLUMN,
    DIGIT_WIDTH,
    FAINT,
    INK,
    LETTER_WIDTH,
    MAX_FONT,
    MAX_WIDTH,
    MIN_FONT,
    MIN_WIDTH,
    PAINTS,
    POINTS,
    ROW_FONT,
    TEXT,
    TITLE_FONT,
    label,
    shade,
)
from meshwright_plan.picture.panel import Panel, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PNG_DPI = 200
MAX_RANKS = 64
ABOVE, BETWEEN, BELOW, RIGHT = 0.28, 0.42, 0.46, 0.1
"""Margins in inches: above the first panel, between panels, below the last one, at the right."""
STYLE: dict[Any, Any] = {
    "hatch.linewidth": 0.45,
    "svg.fonttype": "none",
    "svg.hashsalt": "meshwright",
}
"""Settings of matplotlib, active only while a figure is drawn or saved."""


def figure(panels: Sequence[Panel], unit: Unit = Unit.TICKS) -> Figure:
    """Draw the panels one below the other over one time axis.

    Raises:
        UserError: matplotlib is missing.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [_boxes(panel.timeline) for panel in panels]
    everything = [span for spans in shown for span in spans]
    assert everything, "nothing to draw: no span has a length"
    axis, column = time_axis(everything), typical_shortest(everything)
    titles = [panel.caption or caption(panel.timeline) for panel in panels]
    plot_width = (
        MAX_WIDTH if axis.gap else min(MAX_WIDTH, max(MIN_WIDTH, axis.length / column * COLUMN))
    )
    plot_width = max(plot_width, max(map(len, titles)) * LETTER_WIDTH * TITLE_FONT / POINTS)
    rows = [len(_drawn_ranks(panel.timeline)) for panel in panels]
    row_inches = min(0.28, max(0.13, 5.0 / sum(rows)))
    names = [f"rank {panel.timeline.ranks[-1]}" for panel in panels]
    left = max(len(name) for name in names) * LETTER_WIDTH * ROW_FONT / POINTS + 0.1
    width = left + plot_width + RIGHT
    points_per_time = plot_width * POINTS / axis.length
    entries = [*entries_of(shown), *([READINGS] if any(panel.readings for panel in panels) else [])]
    lines = lines_of(entries, width - left)
    height = (
        ABOVE + sum(rows) * row_inches + BETWEEN * (len(panels) - 1) + BELOW + len(lines) * LINE
    )
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(drawn)  # pyplot would keep the figure in a global and look for a display
        font = _font(everything, column * points_per_time, row_inches * POINTS)
        top = height - ABOVE
        for index, (panel, spans, num_rows) in enumerate(zip(panels, shown, rows, strict=True)):
            top -= num_rows * row_inches
            axes = drawn.add_axes(
                (left / width, top / height, plot_width / width, num_rows * row_inches / height)
            )
            _rows(axes, panel.timeline, axis, row_inches * POINTS)
            _paint(axes, f"panel{index}", panel.timeline, spans, axis, points_per_time, font)
            _paint_readings(axes, panel, axis)
            axes.set_title(titles[index], loc="left", color=TEXT, fontsize=TITLE_FONT, pad=5)
            _time_labels(axes, axis, unit, named=index == len(panels) - 1)
            top -= BETWEEN
        add_legend(drawn, lines, left)
    return drawn


def save(drawn: Figure, path: Path) -> None:
    """Write ``.svg`` (text stays text) or ``.png``, by the suffix;
    the same figure gives the same bytes.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        if path.suffix == ".svg":
            drawn.savefig(path, format="svg", metadata={"Date": None})
        else:
            drawn.savefig(path, format="png", dpi=PNG_DPI, metadata={"Software": None})


def stage_places(timeline: Timeline) -> Mapping[tuple[int, int | None], tuple[int, int]]:
    """Return (rank, stage) -> (index, count) of the stage among those of its rank,
    which set its shade.
    """
    stages_by_rank: dict[int, set[int]] = defaultdict(set)
    for span in timeline.spans:
        if span.action.kind in COMPUTE and span.action.stage is not None:
            stages_by_rank[span.rank].add(span.action.stage)
    return {
        (rank, stage): (place, len(stages))
        for rank, stages in stages_by_rank.items()
        for place, stage in enumerate(sorted(stages))
    }


def _boxes(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.action.kind in PAINTS and span.end > span.start]


def _drawn_ranks(timeline: Timeline) -> list[int | None]:
    """Return the ranks that have a row, with None in place of omitted ones."""
    ranks: list[int | None] = list(timeline.ranks)
    half = MAX_RANKS // 2
    return ranks if len(ranks) <= MAX_RANKS else [*ranks[: half - 1], None, *ranks[-half:]]


def _font(spans: Iterable[Span], column_points: float, row_points: float) -> float:
    """Return the largest font at which the longest number fits into the shortest kind of box,
    within readable sizes.
    """
    digits = max(len(label(span.action)) for span in spans)
    fitting = (column_points - 1.5) / (DIGIT_WIDTH * max(digits, 1))
    return max(MIN_FONT, min(MAX_FONT, fitting, 0.62 * row_points))


def _rows(axes: Axes, timeline: Timeline, axis: TimeAxis, row_points: float) -> None:
    """Set up the axes: a row per rank, and a dotted line where time is left out."""
    ranks = _drawn_ranks(timeline)
    axes.set_xlim(0, axis.length)
    axes.set_ylim(len(ranks), 0)
    names = ["⋮" if rank is None else f"rank {rank}" for rank in ranks]
    size = max(MIN_FONT, min(ROW_FONT, 0.75 * row_points))
    axes.set_yticks([row + 0.5 for row in range(len(ranks))], names, fontsize=size, color=TEXT)
    axes.tick_params(axis="y", length=0, pad=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)
    if axis.gap:
        middle = axis.first_end - axis.start + axis.gap / 2
        axes.plot([middle, middle], [0, len(ranks)], color=FAINT, lw=1.2, ls=(0, (1, 2)))


def _paint(
    axes: Axes,
    name: str,
    timeline: Timeline,
    spans: Sequence[Span],
    axis: TimeAxis,
    points_per_time: float,
    font: float,
) -> None:
    """Draw the boxes, and numbers in those wide enough. An overlapped F and B (a pair)
    are two halves of one box.

    The id of a box in an SVG is ``NAME-rank0-1F2``.
    """
    from matplotlib.patches import Rectangle

    rows = {rank: row for row, rank in enumerate(_drawn_ranks(timeline)) if rank is not None}
    places = stage_places(timeline)
    edge = 0.5 if typical_shortest(spans) * points_per_time > 5 else 0.2
    drawn = axes.get_figure(root=True)
    assert drawn is not None
    row_points = axes.bbox.height / drawn.dpi * POINTS / len(_drawn_ranks(timeline))
    numbered = _numbered(spans, points_per_time, font)
    of_pairs = _extents_of_pairs(spans)
    for span in spans:
        if span.rank not in rows:
            continue
        row, paint, action = rows[span.rank] + 0.04, PAINTS[span.action.kind], span.action
        height = 0.92 if span.beside is None else 0.46
        row += 0.46 if span.beside is not None and action.kind is not Kind.F else 0.0
        colour = shade(action.kind, *places.get((span.rank, action.stage), (0, 1)))
        for first, last in axis.pieces(*of_pairs.get((span.rank, action), (span.start, span.end))):
            box = Rectangle(
                (first, row), last - first, height, facecolor=colour, edgecolor=INK, linewidth=edge
            )
            box.set_hatch(paint.hatch)
            box.set_gid(f"{name}-rank{span.rank}-{action}")
            axes.add_artist(box)
            box.set_clip_on(False)
            is_tall = height * row_points >= 0.8 * font  # a half of a pair in a low row is not
            needed = DIGIT_WIDTH * font * len(label(action)) / points_per_time
            if (
                is_tall
                and action.kind in numbered
                and last - first > max(needed, 0.9 * (span.end - span.start))
            ):
                axes.text(
                    (first + last) / 2,
                    row + 0.53 * height,
                    label(action),
                    ha="center",
                    va="center_baseline",
                    fontsize=font,
                    color=paint.letters,
                )


def _extents_of_pairs(spans: Iterable[Span]) -> dict[tuple[int, Action], tuple[float, float]]:
    """Return (rank, action) -> start and end of its pair,
    for the actions that overlap another one.
    """
    found = {(span.rank, span.action): span for span in spans}
    return {
        key: (min(span.start, other.start), max(span.end, other.end))
        for key, span in found.items()
        if span.beside is not None and (other := found.get((span.rank, span.beside), span))
    }


def _paint_readings(axes: Axes, panel: Panel, axis: TimeAxis) -> None:
    """Draw a dark line at the bottom of the row for each time in which samples were read."""
    rows = {rank: row for row, rank in enumerate(_drawn_ranks(panel.timeline)) if rank is not None}
    for reading in panel.readings:
        for first, last in axis.pieces(reading.start, reading.end) if reading.rank in rows else ():
            foot = rows[reading.rank] + 0.9
            axes.plot([first, last], [foot, foot], color=TEXT, lw=2.0, solid_capstyle="butt")


def _numbered(spans: Iterable[Span], points_per_time: float, font: float) -> set[Kind]:
    """Return the kinds whose longest number fits into their typical box.
    Boxes of other kinds have no numbers.
    """
    lengths: dict[Kind, list[float]] = defaultdict(list)
    digits: dict[Kind, int] = defaultdict(int)
    for span in spans:
        lengths[span.action.kind].append(span.end - span.start)
        digits[span.action.kind] = max(digits[span.action.kind], len(label(span.action)))
    return {
        kind
        for kind, of_kind in lengths.items()
        if digits[kind]
        and median(of_kind) * points_per_time >= DIGIT_WIDTH * font * digits[kind] + 1
    }


def _time_labels(axes: Axes, axis: TimeAxis, unit: Unit, *, named: bool) -> None:
    """Write round times below the axis, on both sides of a cut, counted from the first start."""
    from matplotlib.ticker import MaxNLocator

    size, name = (1.0, "ticks") if unit is Unit.TICKS else unit_of_seconds(axis.end - axis.start)
    locator = MaxNLocator(
        nbins=6 if axis.gap else 10, steps=[1, 2, 5, 10], integer=unit is Unit.TICKS
    )
    places, names = [], []
    for first, last, by in axis.parts:
        for value in locator.tick_values((first - axis.start) / size, (last - axis.start) / size):
            time = value * size + axis.start
            if first - 1e-9 * axis.length <= time <= last + 1e-9 * axis.length:
                places.append(time + by)
                names.append(f"{value:.12g}")
    axes.set_xticks(places, names, fontsize=MIN_FONT, color=TEXT)
    axes.tick_params(axis="x", length=2.5, color=FAINT, pad=1.5)
    if named:
        axes.set_xlabel(f"time ({name})", fontsize=8, color=TEXT, labelpad=2)
