"""Time axis of a figure: the whole time, or the two ends of a long run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.schedule.action import Kind
from meshwright.schedule.analysis import Span
from meshwright.schedule.captions import typical_shortest
from meshwright_plan.picture.palette import DIGIT_WIDTH, MAX_WIDTH, MIN_FONT, POINTS, label

MAX_COLUMNS = 240
"""Largest length of an unabridged axis, in columns: times of the shortest kind of computation."""


class TimeAxis(NamedTuple):
    """Mapping from time to positions on the axis, with a cut in a long run. No cut:
    ``first_end == second_start``.
    """

    start: float
    first_end: float
    second_start: float
    end: float
    gap: float
    """Length of the mark for the time that is left out."""

    @property
    def length(self) -> float:
        """Length of the whole axis, in drawn time."""
        return self.first_end - self.start + self.gap + self.end - self.second_start

    @property
    def parts(self) -> list[tuple[float, float, float]]:
        """Visible parts as (from, to, offset) in time;
        time plus offset is the position on the axis.
        """
        first = (self.start, self.first_end, -self.start)
        by = self.first_end + self.gap - self.second_start - self.start
        return [first, (self.second_start, self.end, by)] if self.gap else [first]

    def pieces(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the visible parts of a span: (from, to) on the axis; none, one or, across the cut,
        two.
        """
        pieces = [(max(start, first) + by, min(end, last) + by) for first, last, by in self.parts]
        return [(first, last) for first, last in pieces if last > first]


def time_axis(spans: Sequence[Span]) -> TimeAxis:
    """Build the axis: the whole time, or the two ends of a long run,
    where the pipeline fills and drains.
    """
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    column = typical_shortest(spans)
    busiest = max(Counter(span.rank for span in spans).values())
    # a few boxes, some of them very long
    if (end - start) / column <= MAX_COLUMNS or busiest <= MAX_COLUMNS / 2:
        return TimeAxis(start, end, end, end, 0.0)
    digits = max(len(label(span.action)) for span in spans)
    readable = MAX_WIDTH * POINTS / (DIGIT_WIDTH * MIN_FONT * digits + 1.5) / 2 * column
    backwards = {
        span.rank: span.end for span in reversed(spans) if span.action.kind in (Kind.B, Kind.I)
    }
    filled = max(backwards.values(), default=end) - start + 8 * column
    keep = max(readable, filled if filled < 1.5 * MAX_COLUMNS * column else 0)
    if 2 * keep > 0.9 * (end - start):
        return TimeAxis(start, end, end, end, 0.0)
    return TimeAxis(start, start + keep, end - keep, end, 3 * column)


def unit_of_seconds(length: float) -> tuple[float, str]:
    """Return the unit in which a length in seconds is a readable number."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((unit for unit in units if length >= 10 * unit[0]), units[-1])
