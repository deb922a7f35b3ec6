"""Seconds of a test run by folder and by file, and the CPU seconds of all its processes.

Shown after each run of more than a minute: `--durations` names tests, but a suite grows by files.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

SHORTEST_S = 60.0
"""Runs below have no table."""
NUM_FOLDERS, NUM_FILES = 15, 10


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all processes that it has waited for:
    the workers of pytest-xdist, with their ranks and commands.
    """
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def table(reports: Iterable[Any]) -> Iterator[str]:
    """Yield a line for each of the slowest folders and files of test reports."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        if hasattr(report, "duration"):
            file = report.nodeid.partition("::")[0]
            folder = "/".join(file.split("/")[:-1][:3])
            for place in (folder + "/", file):
                seconds[place] += report.duration
                tests[place].add(report.nodeid)
    slowest = sorted(seconds, key=lambda place: -seconds[place])
    folders = [place for place in slowest if place.endswith("/")]
    total = sum(seconds[place] for place in folders)
    if total < SHORTEST_S:
        return
    yield f"{total:,.0f} s in tests of all workers, {cpu_seconds():,.0f} CPU s of all processes"
    files = [place for place in slowest if not place.endswith("/")]
    for place in (*folders[:NUM_FOLDERS], *files[:NUM_FILES]):
        yield f"{seconds[place]:7.1f} s {len(tests[place]):6} tests  {place}"
