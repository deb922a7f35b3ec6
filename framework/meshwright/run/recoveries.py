"""Recoveries in place of a run (``watch.mirror``): the launcher's log of them, ``recoveries.jsonl``.

    {"at": "2026-12-01 12:00:00+00:00", "generation": 1, "what": "rank 3 was ended by SIGKILL", "nodes": ["b"],
     "replaced": 1, "change": "", "planned": false, "step": 42, "detected_s": 0.1, "left_s": 1.2, ...,
     "stepped_s": 2.5}

Seconds count from when the failure was seen; ``detected_s`` is before it. Earlier versions left out nodes,
replaced, change, planned, step and detected_s.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshwright.run.directory import RECOVERIES
from meshwright.system.bounded import MIB, lines, open_regular, parse_json

PHASES = ("detected", "left", "groups", "built", "restored", "stepped")
"""Phases of a recovery, in order: each has its seconds in a line."""
MAX_RECOVERIES = 10_000
"""Lines that are read."""


class LoggedRecovery(NamedTuple):
    """One recovery in place."""

    at: str
    what: str
    """Failure that it has repaired."""
    step: int | None
    """First step after it."""
    nodes: tuple[str, ...]
    """Nodes of the failure."""
    replaced: int | None
    """Number of processes that were replaced."""
    seconds: dict[str, float]
    """Seconds of each of PHASES that the line has."""
    change: str = ""
    """Numbers of the layout that it has changed, such as ``dp 4 -> 2, chunks 2 -> 4``."""
    is_planned: bool = False
    """Flag: nodes for more replicas had come, and nothing had failed."""


def read_recoveries(directory: Path) -> Iterator[LoggedRecovery | str]:
    """Yield the recoveries of a run, and a problem in place of each damaged line.

    Raises:
        OSError: the log cannot be read.
    """
    path = directory / RECOVERIES
    with open_regular(path) as file:
        for number, line in lines(file, MIB):
            if number > MAX_RECOVERIES:
                yield f"{path}: lines after {MAX_RECOVERIES} are left out"
                return
            try:
                yield _parse(line)
            except (ValueError, TypeError, OverflowError) as error:
                yield f"{path}:{number} is damaged, and left out: {error}"


def _parse(line: bytes) -> LoggedRecovery:
    """Return one recovery. Raises ValueError, TypeError or OverflowError for any other text."""
    found = parse_json(line)
    if not isinstance(found, dict):
        raise ValueError("it is no table")
    nodes = found.get("nodes", [])
    step, replaced = (_count(found.get(name)) for name in ("step", "replaced"))
    return LoggedRecovery(
        at=str(found["at"]) if "at" in found else "?",
        what=str(found.get("what", "?")),
        step=step,
        nodes=tuple(map(str, nodes)) if isinstance(nodes, list) else (),
        replaced=replaced,
        seconds={
            phase: float(found[f"{phase}_s"])
            for phase in PHASES
            if isinstance(found.get(f"{phase}_s"), int | float)
        },
        change=str(found.get("change", "")),
        is_planned=found.get("planned") is True,
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
