"""Report of a schedule's faults: each with its rows and an arrow under its position."""

from __future__ import annotations

from collections import Counter

from meshwright.schedule.action import Schedule
from meshwright.schedule.analysis.faults import Problem
from meshwright.schedule.text import format_item


def report(schedule: Schedule, problems: list[Problem], limit: int = 8, around: int = 3) -> str:
    """Format the problems, each with the rows around it and an arrow under its place;
    ``limit`` of them.
    """
    counts = ", ".join(
        f"{number} x {fault}" for fault, number in Counter(p.fault for p in problems).items()
    )
    lines = [
        f"{schedule.name} pp={schedule.pp} chunks={schedule.chunks}: {counts or 'no problem found'}"
    ]
    for problem in problems[:limit]:
        lines += [
            "",
            f"{problem.fault}: rank {problem.rank}, position {problem.position}: {problem.text}",
        ]
        lines += _excerpt(schedule, problem, around)
    if len(problems) > limit:
        lines += ["", f"... and {len(problems) - limit} more"]
    return "\n".join(lines)


def _excerpt(schedule: Schedule, problem: Problem, around: int) -> list[str]:
    """Return the row of the problem and its neighbours' rows, by position:
    columns do not stand for time.
    """
    first, end = max(0, problem.position - around), problem.position + around + 1
    ranks = range(max(0, problem.rank - 1), min(schedule.pp, problem.rank + 2))
    cells = {rank: [format_item(item) for item in schedule.rows[rank][first:end]] for rank in ranks}
    widths = [
        max(len(row[i]) if i < len(row) else 0 for row in cells.values())
        for i in range(end - first)
    ]
    lines = []
    for rank, row in cells.items():
        if not row and rank != problem.rank:
            continue  # the row ends before this position
        padded = [f"{cell:<{width}}" for cell, width in zip(row, widths[: len(row)], strict=True)]
        elided = "… " if first else ""
        more = " …" if end < len(schedule.rows[rank]) else ""
        prefix = f"  {rank:>3} | {elided}"
        lines.append((prefix + " ".join(padded) + more).rstrip())
        if rank == problem.rank:
            before = sum(width + 1 for width in widths[: problem.position - first])
            lines.append(" " * (len(prefix) + before) + f"^ {problem.fault}")
    return lines
