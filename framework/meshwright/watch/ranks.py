"""Short text forms of rank and sample lists for messages, with mesh coordinates. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.mesh import Grid

MAX_RUNS = 8
"""Maximum number of ranges that are written out."""


def numbers(values: Iterable[int]) -> str:
    """Format numbers as ``0-3, 6, 8-9``; only the first ``MAX_RUNS`` ranges are written out."""
    runs: list[list[int]] = []
    for number in sorted(set(values)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:MAX_RUNS]]
    return ", ".join(ranges) + (" ..." if len(runs) > MAX_RUNS else "")


def ranks_at(grid: Grid, ranks: Iterable[int]) -> str:
    """Format ranks with their mesh coordinates: ``rank 5 (pp1 dp0 tp1)``,
    ``ranks 4-5 (pp1 dp0 tp0-1)``.
    """
    ordered = sorted(set(ranks))
    at = [grid.coordinates(rank) for rank in ordered]
    where = " ".join(
        f"{axis}{numbers(getattr(each, f'{axis}_rank') for each in at)}" for axis in grid.axes
    )
    return f"rank{'s' * (len(ordered) > 1)} {numbers(ordered)} ({where})"


def samples_named(samples: Iterable[int]) -> str:
    """Format sample indices: ``sample 7``, ``samples 4-7``."""
    ordered = sorted(set(samples))
    return f"sample{'s' * (len(ordered) != 1)} {numbers(ordered)}"
