"""Complete schedules: of a configuration, and by name. No torch."""

from __future__ import annotations

from pathlib import Path

from meshwright.config import Batch, Pipeline, batch_numbers, phases
from meshwright.errors import ScheduleError
from meshwright.schedule.action import Schedule
from meshwright.schedule.analysis import check, report
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright.schedule.text import format_schedule as format_schedule
from meshwright.schedule.text import parse_schedule as parse_schedule
from meshwright.schedule.text import read_schedule as read_schedule
from meshwright.schedule.text import schedule_digest as schedule_digest


def draw_schedules(pipeline: Pipeline, pp: int, batch: Batch) -> list[Schedule]:
    """Return the lowered schedules of a resolved configuration by increasing micro-batches;
    several only with a ramp.

    Raises as :func:`draw_schedule` does.
    """
    largest = draw_schedule(pipeline, pp, batch.chunks)
    sizes = [batch_numbers(batch, phase.samples_seen).chunks for phase in phases(batch)[:-1]]
    return [*(draw_schedule(pipeline, pp, chunks) for chunks in sizes), largest]


def num_forwards(pipeline: Pipeline, pp: int, chunks: int | None) -> int:
    """Return the number of forwards in the schedule of a configuration: stages x micro-batches.
    0 without chunks.
    """
    stages_per_rank = pipeline.interleave or pipeline.stages_per_rank
    return pp * stages_per_rank * (chunks or 0)


def draw_schedule(pipeline: Pipeline, pp: int, chunks: int | None) -> Schedule:
    """Return the lowered and checked schedule of a resolved configuration.
    One read from a file is lowered if needed.

    Raises:
        UserError: it does not fit the degrees, or would hang, lose a micro-batch or compute one
            twice.
    """
    assert chunks is not None, "resolve the configuration first"
    if pipeline.schedule_file is None:
        schedule = lowered_schedule(
            pipeline.schedule, pp, chunks, pipeline.interleave or pipeline.stages_per_rank
        )
    else:
        schedule = _from_file(Path(pipeline.schedule_file), pp, chunks)
    problems = check(schedule)
    if problems:
        where = ""
        if pipeline.schedule_file is not None:
            where = f"{pipeline.schedule_file}, with its messages placed: "
        raise ScheduleError("MW-SCHEDULE-014", f"{where}{report(schedule, problems)}")
    return schedule


def lowered_schedule(name: str, pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build the schedule of this name with communication, gradient reduction and STEP.
    Raises as ``build`` does.
    """
    schedule = build(name, pp, chunks, interleave)
    return schedule if schedule.is_lowered else lower(schedule)


def _from_file(path: Path, pp: int, chunks: int) -> Schedule:
    schedule = read_schedule(path)
    if (schedule.pp, schedule.chunks) != (pp, chunks):
        raise ScheduleError(
            "MW-SCHEDULE-015",
            f"{path} is for pp={schedule.pp} and chunks={schedule.chunks}, but parallel.pp = {pp}"
            f" and batch.chunks = {chunks}: change the one or the other",
        )
    return schedule if schedule.is_lowered else lower(schedule)
