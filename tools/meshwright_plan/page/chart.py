"""Line charts for HTML pages: an SVG that stretches with the page, and labels beside it as HTML text that does not.

Loss  nats per token                     step 400: training 4.21, validation 4.35     values under the pointer
6.0 |\\                                   values of y, as HTML, at their height
5.0 | \\__  ....                          the curves: an SVG of 10,000 x 10,000, stretched; lines keep their width
4.0 |    \\__________
     0    200    400                     values of x
            step                         what x is
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from meshwright_plan.page.points import Point, columns, drawable, thin

SIDE = 10_000
"""Side of the square SVG before stretching; coordinates are whole numbers in it."""
MAX_LABELS, MAX_DOTS, NUM_COLOURS = 6, 50, 6
LOG_FROM = 30.0
"""Ratio of the largest value to the median above which the y axis is logarithmic, if the chart allows it."""


class Quantity(NamedTuple):
    """Quantity on the y axis, and its scale."""

    title: str
    unit: str = ""
    from_zero: bool = False
    """True: the axis includes zero."""
    may_be_log: bool = False
    """True: the axis is logarithmic if the values call for it (see ``LOG_FROM``)."""


class Curve(NamedTuple):
    """One line of a chart, or separate points."""

    name: str
    """Name in the legend; "" leaves it out."""
    points: Sequence[Point]
    """(x, y) with rising x; a y that is not finite is a gap."""
    colour: int = 0
    look: str = ""
    """Any of ``pale`` (behind others), ``lost`` (steps that a resume repeats), ``dots`` (if few), ``mean`` (a running
    mean, left out while the page's script smooths), ``hidden`` (drawn only then), separated by blanks."""
    run: int = 0
    """Index of the run whose steps are the x values, if x is a step."""


class Mark(NamedTuple):
    """An event at one place of the x axis; the legend lists each name once."""

    x: float
    name: str
    bad: bool = False


def chart(
    quantity: Quantity,
    curves: Sequence[Curve],
    *,
    x_name: str = "step",
    marks: Iterable[Mark] = (),
    levels: Iterable[tuple[float, str]] = (),
    legend: bool = True,
) -> Markup:
    """Return a chart as an HTML figure, or "" if no curve has a finite point.

    ``levels``: (y, name) of horizontal lines.
    """
    title, unit, from_zero, may_be_log = quantity
    levels = [(y, name) for y, name in levels if math.isfinite(drawable(y))]
    curves = every = [curve._replace(points=[(x, drawable(y)) for x, y in curve.points]) for curve in curves]
    curves = [curve for curve in curves if curve.look != "hidden"]
    finite = [(x, y) for curve in curves for x, y in curve.points if math.isfinite(y)]
    if not finite:
        return Markup("")
    heights = [y for _, y in finite] + [y for y, _ in levels]
    log = may_be_log and min(heights) > 0 and max(heights) > LOG_FROM * sorted(heights)[len(heights) // 2]
    y_axis = axis([math.log10(y) for y in heights], is_log=True) if log else axis(heights, from_zero=from_zero)
    x_axis = axis([x for curve in curves for x, _ in curve.points], margin=0.0, whole=True)
    marks = sorted(mark for mark in marks if x_axis.low <= mark.x <= x_axis.high)

    frame = Frame(x_axis, y_axis)
    return Markup(
        '<figure class="chart"><figcaption><b>{title}</b> <span class="soft">{unit} '
        '<span class="scale">{scale}</span></span></figcaption><div class="key">{key}</div><div class="plot">'
        '<div class="ys">{ys}</div><div class="area"><svg role="img" aria-label="{title}" viewBox="0 0 {side} {side}" '
        'preserveAspectRatio="none" data-x="{x0} {x1} {x_name}" data-y="{y0} {y1} {kind}" '
        'data-all="{everything}">{drawn}</svg>'
        '<span class="now" aria-hidden="true"></span></div>'
        '<div class="xs">{xs}</div><div class="x-name">{x_name}</div></div></figure>'
    ).format(
        title=title,
        unit=unit,
        scale="logarithmic" if log else "",
        key=_key(curves, marks, levels) if legend else "",
        ys=_labels(y_axis, "top"),
        xs=_labels(x_axis, "left"),
        side=SIDE,
        x_name=x_name,
        x0=f"{x_axis.low:.9g}",
        x1=f"{x_axis.high:.9g}",
        y0=f"{y_axis.low:.9g}",
        y1=f"{y_axis.high:.9g}",
        kind="log" if log else "linear",
        everything=_everything(every, marks, levels, from_zero=from_zero),
        drawn=_drawn(curves, marks, levels, frame),
    )


def _drawn(curves: Sequence[Curve], marks: Sequence[Mark], levels: Sequence[tuple[float, str]], frame: Frame) -> Markup:
    """Return the SVG paths, back to front."""
    drawn = [Markup('<path class="grid" d="{}"/>').format(_grid_lines(frame.y))]
    for mark in marks:
        look = "mark bad" if mark.bad else "mark"
        drawn.append(Markup('<path class="{}" d="M{} 0V{}"/>').format(look, frame.left(mark.x), SIDE))
    for y, _ in levels:
        drawn.append(Markup('<path class="level" d="M0 {}H{}"/>').format(frame.top(y), SIDE))
    for curve in curves:
        colour, points = curve.colour % NUM_COLOURS, thin(curve.points)
        line = Markup('<path class="line {} c{}" data-name="{}" d="{}"/>')
        drawn.append(
            line.format(curve.look.replace("dots", "").replace("mean", ""), colour, curve.name, _path(points, frame))
        )
        dots = points if "dots" in curve.look else _isolated(points)
        if 0 < len(dots) <= MAX_DOTS:
            drawn.append(Markup('<path class="dots c{}" d="{}"/>').format(colour, _path(dots, frame, dots=True)))
    return Markup("").join(drawn)


def _everything(
    curves: Sequence[Curve], marks: Sequence[Mark], levels: Sequence[tuple[float, str]], *, from_zero: bool
) -> str:
    """Return the values of a chart as JSON, from which the page's script redraws it (other axes, smoothing)."""
    names = ("name", "colour", "look", "run")
    drawn = [
        dict(zip(names, (each.name, each.colour % NUM_COLOURS, each.look, each.run), strict=True))
        | columns(each.points)
        for each in curves
        if each.points
    ]
    places = [[mark.x, "mark bad" if mark.bad else "mark"] for mark in marks]
    heights = [y for y, _ in levels]
    return json.dumps({"curves": drawn, "marks": places, "levels": heights, "zero": from_zero}, allow_nan=False)


def _isolated(points: Sequence[Point]) -> list[Point]:
    """Return the single points between two gaps, which a line would hardly show."""
    finite = [False, *(math.isfinite(y) for _, y in points), False]
    return [point for i, point in enumerate(points, 1) if finite[i] and not finite[i - 1] and not finite[i + 1]]


def _key(curves: Sequence[Curve], marks: Sequence[Mark], levels: Sequence[tuple[float, str]]) -> Markup:
    """Return the legend, each name once; "" if it has fewer than two entries."""
    span = Markup('<span class="{}">{}</span>')
    entries = [
        span.format(f"{curve.look} c{curve.colour % NUM_COLOURS}", curve.name)
        for curve in {curve.name: curve for curve in curves if curve.name and curve.points}.values()
    ]
    entries += [span.format("mark bad" if bad else "mark", name) for name, bad in sorted({mark[1:] for mark in marks})]
    entries += [span.format("level", name) for _, name in levels]
    return Markup("").join(entries) if entries[1:] else Markup("")


class Frame(NamedTuple):
    """Mapping from values to coordinates in the SVG square."""

    x: ChartAxis
    y: ChartAxis

    def left(self, x: float) -> int:
        return round(SIDE * self.x.share(x))

    def top(self, y: float) -> int:
        """Return the y coordinate. On a logarithmic axis, values that are not positive lie at the bottom."""
        if self.y.is_log:
            y = math.log10(y) if y > 0 else self.y.low
        return round(SIDE * (1 - self.y.share(y)))


class ChartAxis(NamedTuple):
    """Range of an axis, with labels at round values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    """True if low, high and ticks are logarithms to base 10."""

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, 0..1."""
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        """Format a tick with enough digits to differ from its neighbour, and the unit letter of the largest tick."""
        if self.is_log:
            return short(10**tick)
        spacing = self.ticks[1] - self.ticks[0] if self.ticks[1:] else 0.0
        return short(tick, spacing, max(map(abs, self.ticks)))


def axis(
    values: Sequence[float],
    *,
    from_zero: bool = False,
    is_log: bool = False,
    margin: float = 0.04,
    whole: bool = False,
) -> ChartAxis:
    """Return an axis that holds all values, extended on both sides by ``margin`` times their range.

    ``is_log``: the values are logarithms. ``whole``: the values are whole numbers, and so are the labels.
    """
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        around = max(1.0, abs(high) / 1e6) if whole else abs(high) / 10 or 1.0
        low, high = (0.0, 1.25 * high or 1.0) if from_zero and high >= 0 else (low - around, high + around)
    by = margin * (high - low)
    low, high = low if from_zero and low == 0 else low - by, high + by
    if is_log:
        return ChartAxis(low, high, tuple(_log_ticks(low, high)), is_log)
    step = _round_step(max((high - low) / (MAX_LABELS - 1), 1.0 if whole else 0.0))
    step = 5.0 if whole and step == 2.5 else step
    ticks = (number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1))
    return ChartAxis(low, high, tuple(ticks))


def _round_step(least: float) -> float:
    """Return the smallest 1, 2, 2.5 or 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    """Return ticks at powers of ten, and between them if the range has few decades."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if high - low > 2.5 else (1, 2, 5) if high - low > 0.7 else tuple(range(1, 10))
    ticks = [decade + math.log10(factor) for decade in decades for factor in factors]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside[:: -(-len(inside) // (MAX_LABELS + 1)) or 1]


def short(value: float, spacing: float = 0.0, largest: float = 0.0) -> str:
    """Format a number: ``0``, ``0.05``, ``3e-04``, ``1,200``, ``25k``, ``3.5M``.

    For axis labels: ``spacing`` is their distance and ``largest`` the largest of them.
    """
    if value == 0 or abs(value) < 1e-9 * spacing:
        return "0"
    size, letter = 1.0, ""
    for least, unit, name in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if max(abs(value), largest) >= least:
            size, letter = unit, name
            break
    value, spacing = value / size, spacing / size
    if abs(value) < 1e-3 and not letter:
        return f"{value:.{1 + round(math.log10(max(largest, spacing) / spacing)) if spacing else 2}g}"
    if not spacing:
        return f"{value:,.4g}{letter}"
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    if abs(spacing * 10**digits - round(spacing * 10**digits)) > 1e-6:  # 2.5, 0.25
        digits += 1
    return f"{value:,.{digits}f}{letter}"


def _path(points: Sequence[Point], frame: Frame, *, dots: bool = False) -> str:
    """Return the ``d`` attribute of a curve's path.

    A single point, and each of ``dots``, is a line of length zero: with round ends, it shows as a dot.
    """
    drawn: list[str] = []
    is_open = is_single = False
    for x, y in points:
        if not math.isfinite(y):
            drawn += ["h0"] * is_single
            is_open = is_single = False
            continue
        drawn.append(f"{'L' if is_open else 'M'}{frame.left(x)} {frame.top(y)}{'h0' if dots else ''}")
        is_single = not is_open and not dots
        is_open = not dots
    return "".join([*drawn, *(["h0"] * is_single)])


def _grid_lines(y_axis: ChartAxis) -> str:
    return "".join(f"M0 {round(SIDE * (1 - y_axis.share(tick)))}H{SIDE}" for tick in y_axis.ticks)


def _labels(ticked: ChartAxis, side: str) -> Markup:
    """Return the labels of an axis at their positions: y from the top, x from the left."""
    spans = []
    for tick in ticked.ticks:
        share = 1 - ticked.share(tick) if side == "top" else ticked.share(tick)
        spans.append(Markup('<span style="{}:{}%">{}</span>').format(side, f"{100 * share:.4g}", ticked.label(tick)))
    return Markup("").join(spans)
