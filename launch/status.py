"""Command ``meshwright status``: a run's state, read from ``status.json`` and ``metrics.jsonl``. No torch, no ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from meshwright.errors import DataError
from meshwright.mesh.grid import Grid
from meshwright.run.directory import METRICS, STATUS
from meshwright.terminal.format import format_duration
from meshwright.tracking.jsonl import read_records
from meshwright.tracking.record import StepRecord
from meshwright.watch.hang.diagnosis import lines, seconds
from meshwright.watch.hang.heartbeat import MISSED, RankStatus, ReceivedHeartbeat, Status, in_words, read_status
from meshwright.watch.hang.status import read_standing

LAST_STEPS = 20
"""Number of latest steps whose median is the time per step."""
MOST_RANKS = 16
"""Ranks up to which each has its own line; more are grouped by activity."""


def describe(run: Path) -> str:
    """Return the status of a run as lines: state, step, time left, and the activity of each rank.

    Raises:
        DataError: the status file is missing or damaged.
    """
    status = read_status(run / STATUS)
    is_live, silent_s, state = read_standing(status)
    pace, straggler = _measured(run, status, is_live)
    said = [
        f"run    {run}",
        f"state  {state}",
        f"step   {status.step} of {status.steps}{pace}",
        *([f"waits  {straggler}"] if straggler else []),
    ]
    if status.ended is not None:
        return "\n".join(said)
    grid = Grid(*status.grid)
    missed_s = MISSED * status.tick_s
    if grid.size <= MOST_RANKS:
        table = {rank: ReceivedHeartbeat(None, silent_s) for rank in range(grid.size)}
        table |= {each.beat.rank: ReceivedHeartbeat(each.beat, each.silent_s) for each in status.ranks}
        return "\n".join([*said, "", *lines(table, grid, missed_s)])
    missing = sorted(set(range(grid.size)) - {each.beat.rank for each in status.ranks})
    heard = [*_alike(status.ranks, missed_s)]
    return "\n".join([*said, "", *heard, *([f"nothing heard of yet: {ranges(missing)}"] if missing else [])])


def _measured(run: Path, status: Status, is_live: bool) -> tuple[str, str]:
    """Return the time per step (plus the time left of a live run), and the straggler in the latest record of one."""
    last: deque[StepRecord] = deque(maxlen=LAST_STEPS)
    straggler = ""
    try:
        for record in read_records(run / METRICS):
            last.append(record)
            if record.straggler is not None and record.straggler_share is not None:
                share = f"makes the others wait for {record.straggler_share:.0%} of a step, as of step {record.step}"
                straggler = f"{record.straggler} {share}" if record.straggler else ""
    except DataError:
        return "", ""
    if not last:
        return "", ""
    step_s = median(record.step_s for record in last)
    said = f", {step_s:.3g} s each (median of the last {len(last)})"
    left_s = (status.steps - status.step) * step_s
    if is_live and left_s > 0:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left_s))
        said += f", {format_duration(left_s)} left, until about {until}"
    return said, straggler


def _alike(ranks: Iterable[RankStatus], missed_s: float) -> list[str]:
    """Return one line for each group of ranks with the same activity."""
    together: dict[tuple[int, str, str], list[RankStatus]] = {}
    for each in ranks:
        beat = each.beat
        waits = "" if beat.waits is None else f", waits ({beat.waits.how})"
        heard = "" if each.silent_s <= missed_s else ", not heard of"
        together.setdefault((beat.step, in_words(beat.what) + waits, heard), []).append(each)
    rows = []
    for (step, what, heard), found in together.items():
        longest = max(each.silent_s if heard else each.beat.for_s for each in found)
        since = f"{heard} for up to {seconds(longest)}" if heard else f", for up to {seconds(longest)}"
        rows.append(f"step {step}: {what}{since}: {len(found):,} ranks, {ranges([each.beat.rank for each in found])}")
    return rows


def ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Format numbers as ranges, such as ``0-7, 16``; ``...`` stands for ranges after the first ``most``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join([*said, *(["..."] if len(runs) > most else [])])
