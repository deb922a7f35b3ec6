"""Colours and sizes of figures.

The kinds are distinguished without red and green, and as greys in print: F is lighter (CIE L*) than
B and I, and those are lighter than W. A virtual stage is a shade inside its kind's range of
lightness, the later the darker. REDUCE and STEP are hatched.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.schedule.action import Action, Kind

INK, FAINT = "#1f2933", "#9aa5b1"
TEXT = "#1f2a34"
"""Colour of text outside of boxes; a page in dark mode replaces it."""
TITLE_FONT, ROW_FONT, LEGEND_FONT = 8.5, 8.0, 7.5
MIN_FONT, MAX_FONT = 7.5, 8.5
"""Font sizes of the numbers in boxes, in points. 7.5 are 10 pixels of a screen:
numbers that need less are left out.
"""
DIGIT_WIDTH, LETTER_WIDTH = 0.64, 0.56
"""Width of a digit, and mean width of a letter, in font sizes."""
POINTS = 72.0
"""Points per inch."""
MIN_WIDTH, MAX_WIDTH, COLUMN = 4.5, 13.0, 0.165
"""Smallest and largest width inside the axes, and width of a column where there is room,
in inches.
"""


class Paint(NamedTuple):
    """Colours of the boxes of a kind: from the rank's first stage (``light``)
    to its last (``dark``).
    """

    name: str
    """Name in the legend."""
    light: str
    dark: str
    letters: str
    """Colour of the number in a box."""
    hatch: str = ""


PAINTS: dict[Kind, Paint] = {
    Kind.F: Paint("forward", "#cfe4f8", "#7fb4e6", INK),  # L* 89 .. 71
    Kind.B: Paint("backward", "#f0983c", "#cc6a12", INK),  # L* 70 .. 55
    Kind.I: Paint("input gradient", "#ec8f6a", "#cb5c37", INK),  # L* 69 .. 53
    Kind.W: Paint("weight gradient", "#22777a", "#0c4448", "#ffffff"),  # L* 46 .. 26
    Kind.REDUCE: Paint("reduce", "#ffffff", "#ffffff", INK, "/////"),
    Kind.STEP: Paint("optimizer step", "#d6d9dd", "#d6d9dd", INK, "\\\\\\\\\\"),
}
"""Colours of the kinds that are drawn as boxes. Communication shows as time without computation."""


def shade(kind: Kind, index: int, count: int) -> str:
    """Return the colour of the rank's stage number ``index`` of ``count``;
    a single stage has the first colour.
    """
    paint = PAINTS[kind]
    share = index / (count - 1) if count > 1 else 0.0
    pairs = zip(_channels(paint.light), _channels(paint.dark), strict=True)
    return "#" + "".join(f"{round(light + share * (dark - light)):02x}" for light, dark in pairs)


def label(action: Action) -> str:
    """Return the text in a box: the micro-batch. REDUCE and STEP have none."""
    return "" if action.microbatch is None else str(action.microbatch)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))
