"""Command ``meshwright status``: a run's state, read from ``status.json`` and ``metrics.jsonl``.
No torch, no ranks.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from statistics import median

from meshwright.errors import DataError
from meshwright.run.directory import METRICS, STATUS
from meshwright.terminal.format import format_duration
from meshwright.terminal.output import put
from meshwright.tracking.jsonl import read_records
from meshwright.tracking.record import StepRecord
from meshwright.watch.hang.status import Status, describe_ranks, read_status, run_state

MAX_LEFT_S = 1e9
"""Upper limit, 31 years, of the time left for which a date is printed."""
LAST_STEPS = 20
"""Number of latest steps whose median is the time per step."""


def status(options: argparse.Namespace, _: list[str]) -> int:
    """Print the status of a run."""
    put(describe(options.directory))
    return 0


def describe(run: Path) -> str:
    """Return the status of a run as lines: state, step, time left, and the activity of each rank.

    Raises:
        DataError: the status file is missing or damaged.
    """
    status = read_status(run / STATUS)
    is_live, silent_s, state = run_state(status)
    step_time, straggler = _measure(run, status, is_live)
    lines = [
        f"run    {run}",
        f"state  {state}",
        f"step   {status.step} of {status.steps}{step_time}",
        *([f"waits  {straggler}"] if straggler else []),
    ]
    if status.ended is not None:
        return "\n".join(lines)
    return "\n".join([*lines, "", *describe_ranks(status, silent_s)])


def _measure(run: Path, status: Status, is_live: bool) -> tuple[str, str]:
    """Return the time per step, with the time left of a live run,
    and the straggler of the latest record.
    """
    last: deque[StepRecord] = deque(maxlen=LAST_STEPS)
    straggler = ""
    try:
        for record in read_records(run / METRICS):
            last.append(record)
            if record.straggler is not None and record.straggler_share is not None:
                share = (
                    f"makes the others wait for {record.straggler_share:.0%} of a step, as of step"
                    f" {record.step}"
                )
                straggler = f"{record.straggler} {share}" if record.straggler else ""
    except DataError:
        return "", ""
    if not last:
        return "", ""
    step_s = median(record.step_s for record in last)
    step_time = f", {step_s:.3g} s each (median of the last {len(last)})"
    left_s = (status.steps - status.step) * step_s
    if is_live and 0 < left_s < MAX_LEFT_S:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left_s))
        step_time += f", {format_duration(left_s)} left, until about {until}"
    return step_time, straggler
