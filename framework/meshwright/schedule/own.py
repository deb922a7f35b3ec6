"""A user's own schedules: ``pipeline.schedule = "package.module:function"``.
This module imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.config.functions import error_place, find_function
from meshwright.errors import ScheduleError, reason_of
from meshwright.schedule.action import Placement, Schedule
from meshwright.schedule.text import parse_schedule


def own_schedule(path: str, pp: int, chunks: int, num_stages: int) -> Schedule:
    """Call the function with (pp, chunks, num_stages);
    it returns the actions of each pipeline rank in text form.

    Stages are placed on the ranks in a loop, or in a V if only that fits the rows.

    Raises:
        ScheduleError: the function fails, or returns no rows of actions.
    """
    wanted = (
        "a function of (pp, chunks, num_stages) that returns a row of actions for each pipeline"
        " rank"
    )
    function = find_function(path, "pipeline.schedule", wanted, ScheduleError)
    call = f"pipeline.schedule = {path!r} with pp={pp}, chunks={chunks}, num_stages={num_stages}"
    try:
        rows = [
            row if isinstance(row, str) else " ".join(map(str, row))
            for row in function(pp, chunks, num_stages)
        ]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ScheduleError(
            "MW-SCHEDULE-017",
            f"{call} failed{error_place(error)}: {reason_of(error)}; write {wanted}",
        ) from error
    header = f"# {path} pp={pp} num_stages={num_stages} chunks={chunks} placement={Placement.LOOP}"
    text = "\n".join([header, *(" ".join(row.split()) for row in rows)])
    schedule = parse_schedule(text, f"{call}: returned as text, ")
    as_v = replace(schedule, placement=Placement.V)
    return as_v if _fits(as_v) and not _fits(schedule) else schedule


def _fits(schedule: Schedule) -> bool:
    """Return whether every row has only actions of its rank's stages."""
    ranks = range(schedule.pp)
    return all(
        {action.stage for _, action in schedule.actions(r)} <= {*schedule.stages_of(r), None}
        for r in ranks
    )
