"""Curves as a part of a page: SVG that stretches with the page, its letters beside it as text that does not.

Loss  nats per token                     step 400: training 4.21, validation 4.35     what is under the pointer
6.0 |\\                                   values of y, as HTML, at their height
5.0 | \\__  ....                          the curves: an SVG of 10,000 x 10,000, stretched; lines keep their width
4.0 |    \\__________
     0    200    400                     values of x
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

SIDE = 10_000
"""Of the square that is stretched: places are whole numbers in it."""
MOST_POINTS = 600
"""Of a curve; of more, the lowest and the highest of neighbours stay, so that no spike is lost."""
MOST_LABELS = 6
NUM_COLOURS = 6
LOG_FROM = 30.0
"""From which largest value over the median a scale is logarithmic, where it may be."""

Point = tuple[float, float]


class Curve(NamedTuple):
    """One line, or points on one."""

    name: str
    """For the legend; "": not told."""
    points: Sequence[Point]
    """x rising; a y that is not finite is a gap."""
    colour: int = 0
    look: str = ""
    """Of ``pale`` (behind others), ``dots``, ``dashed``; with blanks between."""


class Mark(NamedTuple):
    """A place on the x axis at which something happened."""

    x: float
    name: str
    bad: bool = False


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_name: str = "step",
    unit: str = "",
    from_zero: bool = False,
    may_be_log: bool = False,
    marks: Iterable[Mark] = (),
    levels: Iterable[tuple[float, str]] = (),
) -> Markup:
    """A figure of HTML; "" where no curve has a point. ``levels``: (y, name) of lines across."""
    levels = list(levels)
    finite = [(x, y) for curve in curves for x, y in curve.points if math.isfinite(y)]
    if not finite:
        return Markup("")
    heights = [y for _, y in finite] + [y for y, _ in levels]
    log = may_be_log and min(heights) > 0 and max(heights) > LOG_FROM * sorted(heights)[len(heights) // 2]
    y_axis = axis([math.log10(y) for y in heights] if log else heights, from_zero=from_zero and not log)
    x_axis = axis([x for x, _ in finite], tight=True)

    def place(x: float, y: float) -> tuple[int, int]:
        height = (math.log10(y) if y > 0 else y_axis.low) if log else y
        return round(SIDE * x_axis.share(x)), round(SIDE * (1 - y_axis.share(height)))

    drawn = [Markup('<path class="grid" d="{}"/>').format(_across(y_axis))]
    for mark in sorted(marks):
        if x_axis.low <= mark.x <= x_axis.high:
            at = round(SIDE * x_axis.share(mark.x))
            look = "mark bad" if mark.bad else "mark"
            drawn.append(
                Markup('<path class="{}" d="M{} 0V{}"><title>{}</title></path>').format(look, at, SIDE, mark.name)
            )
    for y, name in levels:
        height = place(x_axis.low, y)[1]
        drawn.append(Markup('<path class="level" d="M0 {}H{}"><title>{}</title></path>').format(height, SIDE, name))
    for curve in curves:
        colour, points = curve.colour % NUM_COLOURS, thin(curve.points)
        dots = "dots" in curve.look
        drawn.append(
            Markup('<path class="line {} c{}" data-name="{}" d="{}"/>').format(
                curve.look.replace("dots", ""), colour, curve.name, _path(points, place)
            )
        )
        if dots:
            drawn.append(Markup('<path class="dots c{}" d="{}"/>').format(colour, _path(points, place, dots=True)))
    told = [
        Markup('<span class="{} c{}">{}</span>').format(curve.look, curve.colour % NUM_COLOURS, curve.name)
        for curve in curves
        if curve.name and curve.points
    ]
    told += [Markup('<span class="level">{}</span>').format(name) for _, name in levels]
    return Markup(
        '<figure class="chart"><figcaption><b>{title}</b> <span class="soft">{unit}{scale}</span>'
        '<span class="now" aria-hidden="true"></span></figcaption><div class="key">{key}</div><div class="plot">'
        '<div class="ys">{ys}</div><div class="area"><svg role="img" aria-label="{title}" viewBox="0 0 {side} {side}" '
        'preserveAspectRatio="none" data-x="{x0} {x1} {x_name}" data-y="{y0} {y1} {kind}">{drawn}</svg></div>'
        '<div class="xs">{xs}</div></div></figure>'
    ).format(
        title=title,
        unit=unit,
        scale=(", " if unit else "") + "logarithmic" if log else "",
        key=Markup("").join(told) if len(told) > 1 else "",
        ys=_labels(y_axis, "top", lambda value: short(10**value) if log else y_axis.label(value)),
        xs=_labels(x_axis, "left", x_axis.label),
        side=SIDE,
        x_name=x_name,
        x0=f"{x_axis.low:.9g}",
        x1=f"{x_axis.high:.9g}",
        y0=f"{y_axis.low:.9g}",
        y1=f"{y_axis.high:.9g}",
        kind="log" if log else "linear",
        drawn=Markup("").join(drawn),
    )


class Axis(NamedTuple):
    """From low to high, with labels at round values."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where a value lies, 0..1."""
        return (value - self.low) / (self.high - self.low)

    def label(self, value: float) -> str:
        """Of a tick: with as many digits as tell it from its neighbour."""
        apart = self.ticks[1] - self.ticks[0] if self.ticks[1:] else 0.0
        return short(value, apart)


def axis(values: Sequence[float], *, from_zero: bool = False, tight: bool = False) -> Axis:
    """That holds all values. ``tight``: ends where they end; otherwise at round values."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(high) / 10 or 1.0
        low, high = (0.0, 2 * high) if from_zero and high > 0 else (low - margin, high + margin)
    step = _round_step((high - low) / (MOST_LABELS - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    if tight:
        inside = tuple(tick for tick in ticks if low <= tick <= high)
        return Axis(low, high, inside)
    return Axis(ticks[0], ticks[-1], tuple(ticks))


def _round_step(least: float) -> float:
    """1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def short(value: float, apart: float = 0.0) -> str:
    """``0``, ``0.05``, ``3e-04``, ``1,200``, ``25k``, ``3.5M``: for an axis whose labels lie ``apart``."""
    if value == 0 or abs(value) < 1e-9 * apart:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if letter == "k" else size
            digits = max(0, -math.floor(math.log10(apart / scale) + 1e-9)) if apart else 2
            return f"{value / scale:,.{min(digits, 3)}f}{letter}" if apart else f"{value / scale:.3g}{letter}"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    if not apart:
        return f"{value:,.4g}"
    digits = max(0, -math.floor(math.log10(apart) + 1e-9))
    if apart * 10**digits % 1 > 1e-6:  # 2.5, 0.25
        digits += 1
    return f"{value:,.{digits}f}"


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about so many: of neighbours the lowest and the highest, and all ends of gaps."""
    if len(points) <= most:
        return list(points)
    width = -(-2 * len(points) // most)
    kept: list[Point] = [points[0]]
    for first in range(0, len(points), width):
        together = points[first : first + width]
        finite = [index for index, (_, y) in enumerate(together) if math.isfinite(y)]
        heights = {together[index][1]: index for index in finite}
        chosen = {heights[min(heights)], heights[max(heights)]} if heights else set()
        if len(finite) < len(together):
            chosen.add(next(index for index, (_, y) in enumerate(together) if not math.isfinite(y)))
        kept += [together[index] for index in sorted(chosen)]
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _path(points: Sequence[Point], place: Callable[[float, float], tuple[int, int]], *, dots: bool = False) -> str:
    """The ``d`` of a curve. A point alone, and each of ``dots``, is a line of no length: with round ends, a dot."""
    drawn: list[str] = []
    open_ = alone = False
    for x, y in points:
        if not math.isfinite(y):
            drawn += ["h0"] * alone
            open_ = alone = False
            continue
        left, top = place(x, y)
        drawn.append(f"{'L' if open_ else 'M'}{left} {top}{'h0' if dots else ''}")
        alone = not open_ and not dots
        open_ = not dots
    return "".join([*drawn, *(["h0"] * alone)])


def _across(y_axis: Axis) -> str:
    return "".join(f"M0 {round(SIDE * (1 - y_axis.share(tick)))}H{SIDE}" for tick in y_axis.ticks)


def _labels(of: Axis, side: str, told: Callable[[float], str]) -> Markup:
    """At their places: y from the top, x from the left."""
    spans = []
    for tick in of.ticks:
        share = 1 - of.share(tick) if side == "top" else of.share(tick)
        spans.append(Markup('<span style="{}:{}%">{}</span>').format(side, f"{100 * share:.4g}", told(tick)))
    return Markup("").join(spans)
