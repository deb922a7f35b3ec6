"""Heat maps of the experts' load: experts x steps, one for each layer,
from ``expert-load.jsonl``.
"""

from __future__ import annotations

import json
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.system.bounded import MIB, lines, open_regular, parse_json
from meshwright.tracking.record import EXPERT_LOAD

MAX_LAYERS, MAX_STEPS, MAX_ROWS = 6, 60, 32
"""Maximum number of layers, columns and rows of the maps.
A row of several experts shows the one with most tokens.
"""
FINEST = 100
"""Loads are written in units of a hundredth of the mean, up to the largest of 16 bits."""
MAX_COUNT = 2**53


class HeatMap(NamedTuple):
    """Map of one layer."""

    title: str
    label: str
    """Description for screen readers, with the busiest expert of the last step."""
    rows: int
    last_expert: int
    """Label of the lowest row; that of the highest is 0."""
    steps: list[int]
    """Step of each column."""
    data: str
    """Experts, experts of a row, steps and loads as JSON."""


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
        maps.append(_map(name, columns))
    return maps


def _map(name: str, columns: Sequence[tuple[int, list[int]]]) -> HeatMap:
    """Return a map with a column for each step, and a row for each expert or few neighbours."""
    num_experts, steps = len(columns[0][1]), [step for step, _ in columns]
    group = -(-num_experts // MAX_ROWS)
    rows = -(-num_experts // group)
    loads = array("H")
    for _, counts in columns:
        mean = max(1e-9, sum(counts) / len(counts))
        of_rows = (counts[row * group : (row + 1) * group] for row in range(rows))
        loads.extend(min(2**16 - 1, round(FINEST * max(few, default=0) / mean)) for few in of_rows)
    if sys.byteorder == "big":
        loads.byteswap()
    packed = b64encode(loads.tobytes()).decode()
    data = {"experts": num_experts, "group": group, "steps": steps, "loads": packed}
    title, last = f"{name}: {num_experts} experts", columns[-1][1]
    share = max(last) * len(last) / max(1, sum(last))
    label = (
        f"Heat map of {title}, steps {steps[0]} to {steps[-1]}. At the last one expert"
        f" {last.index(max(last))} is the busiest, with {share:.2f} x the mean"
    )
    return HeatMap(title, label, rows, num_experts - 1, steps, json.dumps(data))
