"""Legend of a figure: a patch for each kind and shade in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.schedule.action import COMPUTE, Kind
from meshwright.schedule.analysis import Span
from meshwright_plan.picture.palette import (
    INK,
    LEGEND_FONT,
    LETTER_WIDTH,
    PAINTS,
    POINTS,
    TEXT,
    shade,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE = 0.17
"""Inches from one line to the next."""


class Entry(NamedTuple):
    """Legend entry of one kind: its name, a patch for each shade."""

    name: str
    colours: tuple[str, ...]
    hatch: str = ""

    @property
    def inches(self) -> float:
        """Width in inches."""
        return (LETTER_WIDTH * len(self.name) + 4.0) * LEGEND_FONT / POINTS


READINGS = Entry("samples read", (TEXT,))


def entries_of(panels: Iterable[Iterable[Span]]) -> list[Entry]:
    """Return the legend entries of the boxes of these panels."""
    stages: dict[tuple[int, int, Kind], set[int | None]] = defaultdict(set)
    for index, spans in enumerate(panels):
        for span in spans:
            stages[index, span.rank, span.action.kind].add(span.action.stage)
    entries: list[Entry] = []
    for kind, paint in PAINTS.items():
        count = max((len(own) for (*_, each), own in stages.items() if each is kind), default=0)
        if count and kind in COMPUTE:
            name = f"{kind}, {paint.name}" + " (the darker, the later a stage of the rank)" * (
                count > 1 and not entries
            )
            entries.append(Entry(name, tuple(shade(kind, place, count) for place in range(count))))
        elif count:
            entries.append(Entry(paint.name, (paint.light,), paint.hatch))
    return entries


def lines_of(entries: Sequence[Entry], width: float) -> list[list[Entry]]:
    """Lay out entries in lines, as many on each as fit into the width in inches."""
    lines: list[list[Entry]] = [[]]
    for entry in entries:
        if lines[-1] and sum(each.inches for each in [*lines[-1], entry]) > width:
            lines.append([])
        lines[-1].append(entry)
    return lines


def add_legend(drawn: Figure, lines: Sequence[Sequence[Entry]], left: float) -> None:
    """Draw the legend at the bottom of the figure, ``left`` inches from its edge."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    width, height = drawn.get_size_inches()
    for number, line in enumerate(lines):
        patches: list[Any] = [
            tuple(
                Patch(facecolor=colour, edgecolor=INK, linewidth=0.5, hatch=entry.hatch)
                for colour in entry.colours
            )
            for entry in line
        ]
        drawn.legend(
            patches,
            [entry.name for entry in line],
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
            loc="lower left",
            bbox_to_anchor=(left / width, ((len(lines) - 1 - number) * LINE + 0.05) / height),
            ncols=len(line),
            fontsize=LEGEND_FONT,
            labelcolor=TEXT,
            frameon=False,
            handlelength=2.0,
            columnspacing=1.5,
            borderaxespad=0.0,
            borderpad=0.0,
        )
