"""Heat maps of the experts' load: experts x steps, one for each layer,
from ``expert-load.jsonl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup, escape

from meshwright.system.bounded import MIB, lines, open_regular, parse_json
from meshwright.tracking.record import EXPERT_LOAD

MAX_LAYERS, MAX_STEPS, MAX_ROWS = 6, 60, 32
"""Maximum number of layers, columns and rows of the maps.
A row of several experts shows the one with most tokens.
"""
CELL = 9
"""Height of a cell in pixels; its width follows from the page."""
MAX_COUNT = 2**53


class HeatMap(NamedTuple):
    """Map of one layer."""

    title: str
    picture: Markup
    last_expert: int
    """Label of the lowest row; that of the highest is 0."""
    steps: tuple[int, int]
    """Labels of the first and the last column."""


def read_loads(run: Path) -> dict[int, dict[str, list[int]]]:
    """Return step -> router -> tokens of each expert; what cannot be read is left out.
    A repeated step counts once.
    """
    found: dict[int, dict[str, list[int]]] = {}
    try:
        with open_regular(run / EXPERT_LOAD) as file:
            for _, line in lines(file, MIB):
                load = _parse(line)
                if load is not None:
                    found[load[0]] = load[1]
    except (OSError, ValueError):
        pass
    return dict(sorted(found.items()))


def _parse(line: bytes) -> tuple[int, dict[str, list[int]]] | None:
    """Return the step and the counts of a line; None for any other text."""
    try:
        content = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    step, counts = (
        (content.get("step"), content.get("counts")) if isinstance(content, dict) else (None, None)
    )
    if type(step) is not int or not 0 <= step < MAX_COUNT or not isinstance(counts, dict):
        return None
    for layer in counts.values():
        if not isinstance(layer, list) or any(
            type(count) is not int or not 0 <= count < MAX_COUNT for count in layer
        ):
            return None
    return step, counts


def evenly(values: Sequence[str] | Sequence[int], most: int) -> list[int]:
    """Return up to ``most`` positions of a sequence, evenly spaced, with the first and the last."""
    last, count = len(values) - 1, min(most, len(values))
    return sorted({round(i * last / max(1, count - 1)) for i in range(count)})


def heat_maps(run: Path) -> list[HeatMap]:
    """Return the maps of up to ``MAX_LAYERS`` layers; empty without the file."""
    loads = read_loads(run)
    names = [name for name, layer in (next(iter(loads.values())) if loads else {}).items() if layer]
    maps = []
    for position in evenly(names, MAX_LAYERS):
        name = names[position]
        columns = [
            (step, load[name]) for step, load in loads.items() if len(load.get(name, [])) > 0
        ]
        columns = [columns[at] for at in evenly([step for step, _ in columns], MAX_STEPS)]
        num_experts, steps = len(columns[0][1]), (columns[0][0], columns[-1][0])
        title = f"{name}: {num_experts} experts, steps {steps[0]} to {steps[1]}"
        maps.append(HeatMap(title, _draw(title, columns), num_experts - 1, steps))
    return maps


def _draw(title: str, columns: Sequence[tuple[int, list[int]]]) -> Markup:
    """Return an SVG: a column for each step, a row for each expert;
    the mean load has half of the full colour.
    """
    num_experts = len(columns[0][1])
    group = -(-num_experts // MAX_ROWS)
    rows = -(-num_experts // group)
    cells = []
    for x, (step, counts) in enumerate(columns):
        mean = max(1e-9, sum(counts) / len(counts))
        for y in range(rows):
            of_row = counts[y * group : (y + 1) * group]
            load = max(of_row, default=0) / mean
            expert = y * group + (of_row.index(max(of_row)) if of_row else 0)
            hint = f"step {step}, expert {expert}: {load:.2f} x mean"
            cells.append(
                f'<rect x="{x * CELL}" y="{y * CELL}" width="{CELL}" height="{CELL}" fill="#2f6fb0"'
                f' fill-opacity="{min(1.0, load / 2):.2f}"><title>{hint}</title></rect>'
            )
    width, height = len(columns) * CELL, rows * CELL
    head = (
        f'<svg role="img" aria-label="{escape(title)}" height="{height}"'
        ' preserveAspectRatio="none" '
    )
    return Markup(f'{head}viewBox="0 0 {width} {height}">{"".join(cells)}</svg>')
