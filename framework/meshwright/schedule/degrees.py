"""Checks of the degrees of a schedule: stages per rank, and forwards per step."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from meshwright.config import MAX_FORWARDS, V_SCHEDULES
from meshwright.errors import ScheduleError

INTERLEAVES = {"interleaved_1f1b": range(2, sys.maxsize), **dict.fromkeys(V_SCHEDULES, range(2, 3))}
"""Possible numbers of stages per rank of each schedule; only 1 for schedules not listed."""


def check_degrees(name: str, names: Sequence[str], pp: int, chunks: int, interleave: int) -> None:
    """Check that the schedule ``name``, one of ``names``, exists for these degrees;
    raise :class:`ScheduleError`.
    """
    if name not in names and ":" not in name:
        raise ScheduleError(
            "MW-SCHEDULE-009",
            f"pipeline.schedule={name!r} is not known: choose one of {', '.join(names)}",
        )
    if pp < 1 or chunks < 1 or interleave < 1:
        raise ScheduleError(
            "MW-SCHEDULE-010",
            f"pp={pp}, chunks={chunks}, interleave={interleave}: a step needs at least one pipeline"
            " rank, one micro-batch and one stage per rank",
        )
    if pp * chunks * interleave > MAX_FORWARDS:
        raise ScheduleError(
            "MW-SCHEDULE-011",
            f"pp={pp} x chunks={chunks} x interleave={interleave} = {pp * chunks * interleave:,}"
            f" forwards in a step, and at most {MAX_FORWARDS:,} are scheduled: lower batch.chunks,"
            " parallel.pp or pipeline.interleave",
        )
    possible = {schedule: INTERLEAVES.get(schedule, range(1, 2)) for schedule in names}
    if name in possible and interleave not in possible[name]:
        first, has_one = possible[name][0], len(possible[name]) == 1
        raise ScheduleError(
            "MW-SCHEDULE-012",
            f"pipeline.interleave={interleave}: {name} has {first}{'' if has_one else ' or more'}"
            f" stages on each rank: set pipeline.interleave={first}, or choose a schedule that can"
            f" have {interleave}:"
            f" {', '.join(schedule for schedule in names if interleave in possible[schedule])}",
        )
