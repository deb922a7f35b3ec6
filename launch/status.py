"""``meshwright status``: where a run stands, out of ``status.json`` and ``metrics.jsonl``. Needs no torch, no rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from meshwright.errors import DataError
from meshwright.mesh.grid import Grid
from meshwright.tracking.console import duration
from meshwright.tracking.jsonl import read_records
from meshwright.tracking.record import StepRecord
from meshwright.watch.hang.diagnosis import lines, seconds
from meshwright.watch.hang.heartbeat import MISSED, RankStatus, Seen, Status, in_words, read_status
from meshwright.watch.hang.status import standing

LAST_STEPS = 20
"""Steps that the time per step is the median of."""
MOST_RANKS = 16
"""Ranks that have a line each; more are put together by what they do."""


def describe(run: Path) -> str:
    """Many lines: state, step, time left, and what each rank does.

    Raises:
        DataError: there is no status, or it is damaged.
    """
    status = read_status(run)
    is_live, silent_s, state = standing(status)
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
        table = {rank: Seen(None, silent_s) for rank in range(grid.size)}
        table |= {each.beat.rank: Seen(each.beat, each.silent_s) for each in status.ranks}
        return "\n".join([*said, "", *lines(table, grid, missed_s)])
    missing = sorted(set(range(grid.size)) - {each.beat.rank for each in status.ranks})
    heard = [*_alike(status.ranks, missed_s)]
    return "\n".join([*said, "", *heard, *([f"nothing heard of yet: {ranges(missing)}"] if missing else [])])


def _measured(run: Path, status: Status, is_live: bool) -> tuple[str, str]:
    """Time per step, and for a live run when it will have taken all; and who made the others wait at the last look."""
    last: deque[StepRecord] = deque(maxlen=LAST_STEPS)
    straggler = ""
    try:
        for record in read_records(run / "metrics.jsonl"):
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
        said += f", {duration(left_s)} left, until about {until}"
    return said, straggler


def _alike(ranks: Iterable[RankStatus], missed_s: float) -> list[str]:
    """A line for all ranks that do the same."""
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
    """``0-7, 16``; the first so many runs of neighbours."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join([*said, *(["..."] if len(runs) > most else [])])
