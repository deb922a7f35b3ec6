"""Line charts for HTML pages: what the page's script (``charts.js.j2``) draws, as data.

Loss  nats per token                     step 400: training 4.21, validation 4.35     values under the pointer
6.0 |\\                                   values of y, as HTML, at their height
5.0 | \\__  ....                          the curves: an SVG that is stretched with the page; lines keep their width
4.0 |    \\__________
     0    200    400                     values of x
            step                         what x is

Axes, labels and paths exist once, in the script, which draws them again for a zoom, for smoothing
and for other axes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright_plan.page.points import Point, columns, drawable

NUM_COLOURS = 6
INK = -1
"""Colour of the page's text, for curves that stand beside those of a run."""
MAX_LABELLED = 12
"""Maximum number of curves whose last value is in the label of a chart."""
LOG_FROM = 30.0
"""Ratio of the largest value to the median above which the y axis is logarithmic,
if the chart allows it.
"""


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
    """Any of ``pale`` (behind others), ``lost`` (steps that a restart repeats), ``dots`` (if few),
    ``mean`` (a running mean, left out while the page's script smooths), ``hidden`` (drawn only
    then), separated by blanks.
    """
    run: int = 0
    """Index of the run whose steps are the x values, if x is a step."""


class Mark(NamedTuple):
    """An event at one place of the x axis; the legend lists each name once."""

    x: float
    name: str
    kind: str = ""
    """``bad`` (a tick at the bottom), ``recovery``, or a line for anything else."""

    @property
    def look(self) -> str:
        """Class of its line and of its legend entry."""
        return f"mark {self.kind}".strip()


class Chart(NamedTuple):
    """A chart as its template takes it."""

    title: str
    unit: str
    label: str
    """Description for screen readers, with the last value of each curve."""
    legend: tuple[tuple[str, str], ...]
    """(class, name) of each entry; empty for a single curve without marks."""
    data: str
    """Curves, marks, levels and scales as JSON."""


def chart(
    quantity: Quantity,
    curves: Sequence[Curve],
    *,
    marks: Iterable[Mark] = (),
    levels: Iterable[tuple[float, str]] = (),
    legend: bool = True,
) -> Chart | None:
    """Return a chart, or None if no curve has a finite point.

    ``levels``: (y, name) of horizontal lines.
    """
    levels = [(y, name) for y, name in levels if math.isfinite(drawable(y))]
    curves = [
        curve._replace(points=[(x, drawable(y)) for x, y in curve.points]) for curve in curves
    ]
    shown = [curve for curve in curves if curve.look != "hidden"]
    heights = [y for curve in shown for _, y in curve.points if math.isfinite(y)]
    if not heights:
        return None
    places = [x for curve in shown for x, _ in curve.points]
    marks = sorted(mark for mark in marks if min(places) <= mark.x <= max(places))
    data = {
        "curves": [_columns_of(curve) for curve in curves if curve.points],
        "marks": [[mark.x, mark.look] for mark in marks],
        "levels": [y for y, _ in levels],
        "zero": quantity.from_zero,
        "log": quantity.may_be_log and _needs_log(heights + [y for y, _ in levels]),
    }
    entries = _legend(shown, marks, levels) if legend else ()
    label = _label(quantity, shown)
    return Chart(quantity.title, quantity.unit, label, entries, json.dumps(data, allow_nan=False))


def tone(colour: int) -> str:
    """Return the classes of a colour: those after the last one come again, dashed."""
    if colour < 0:
        return "ink"
    return f"c{colour % NUM_COLOURS}" + f" d{colour // NUM_COLOURS % 3}" * (colour >= NUM_COLOURS)


def _label(quantity: Quantity, curves: Sequence[Curve]) -> str:
    """Describe a chart by the last finite value of its curves."""
    last = []
    for curve in curves:
        finite = [(x, y) for x, y in curve.points if math.isfinite(y)]
        if finite and "lost" not in curve.look and "pale" not in curve.look:
            last.append(f"{curve.name} {finite[-1][1]:.5g} at step {finite[-1][0]:,}")
    title = f"{quantity.title}{f' ({quantity.unit})' if quantity.unit else ''}"
    more = f", and {len(last) - MAX_LABELLED} more curves" if len(last) > MAX_LABELLED else ""
    return f"{title}: {', '.join(last[:MAX_LABELLED])}{more}"


def _needs_log(heights: Sequence[float]) -> bool:
    """Return True if the largest value would hide the others on a linear axis."""
    median = sorted(heights)[len(heights) // 2]
    return min(heights) > 0 and max(heights) > LOG_FROM * median


def _columns_of(curve: Curve) -> dict[str, object]:
    look = {"name": curve.name, "tone": tone(curve.colour), "look": curve.look}
    return {**look, "run": curve.run, **columns(curve.points)}


def _legend(
    curves: Sequence[Curve], marks: Sequence[Mark], levels: Sequence[tuple[float, str]]
) -> tuple[tuple[str, str], ...]:
    """Return (class, name) of the entries, each name once; none if fewer than two."""
    named = {curve.name: curve for curve in curves if curve.name and curve.points}
    entries = [
        *((f"{curve.look} {tone(curve.colour)}".strip(), name) for name, curve in named.items()),
        *dict.fromkeys((mark.look, mark.name) for mark in marks),
        *(("level", name) for _, name in levels),
    ]
    return tuple(entries) if len(entries) > 1 else ()
