"""Points of curves as columns of numbers for the script of a page."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MAX_ROWS = 800
"""Largest number of rows of a curve's columns, if it has more than three times as many points. A
row then has the mean, lowest and highest of neighbouring points.
"""

Point = tuple[float, float]
Column = str | list[float]
"""Base64 of float32 values, little-endian; or [first, spacing,
count] where all spacings are equal.
"""


MAX_DRAWN, MIN_DRAWN = 1e100, 1e-100
"""Largest and smallest value of a chart: sums,
squares and ranges of such values neither overflow nor vanish.
"""


def drawable(value: float) -> float:
    """Return a value that a chart can draw: NaN, a gap, beyond ``MAX_DRAWN``;
    0 below ``MIN_DRAWN``.
    """
    size = abs(value)
    if not size <= MAX_DRAWN:
        return math.nan
    return float(value) if size >= MIN_DRAWN else 0.0


def columns(points: Sequence[Point]) -> dict[str, Any]:
    """Return a curve as columns: ``x``, ``y``, and ``width``, the number of points per row.

    With more than one point in a row, x is that of the first, y the mean, ``low`` and ``high`` the
    extremes. A row without a finite value is NaN, a gap.
    """
    width = -(-len(points) // MAX_ROWS) if len(points) > 3 * MAX_ROWS else 1
    rows = [points[first : first + width] for first in range(0, len(points), width)]
    finite = [[y for _, y in row if math.isfinite(y)] or [math.nan] for row in rows]
    found: dict[str, Any] = {
        "width": width,
        "x": column([row[0][0] for row in rows]),
        "y": column(
            [math.fsum(values) / len(values) if len(values) > 1 else values[0] for values in finite]
        ),
    }
    if width > 1:
        found |= {"low": column(list(map(min, finite))), "high": column(list(map(max, finite)))}
    return found


def column(values: Sequence[float]) -> Column:
    """Encode numbers for the script of a page."""
    spacing = values[1] - values[0] if len(values) > 1 else 1.0
    is_finite = bool(values) and math.isfinite(values[0]) and math.isfinite(spacing)
    if is_finite and all(later - earlier == spacing for earlier, later in pairwise(values)):
        return [values[0], spacing, len(values)]
    return _packed(values)


def _packed(values: Sequence[float]) -> str:
    packed = array("f", [value if abs(value) < 3e38 else math.nan for value in values])
    if sys.byteorder == "big":
        packed.byteswap()
    return b64encode(packed.tobytes()).decode()
