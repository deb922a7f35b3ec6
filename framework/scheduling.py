"""The schedule of a configuration: built by its name or read from a file, lowered and checked. No torch."""

from __future__ import annotations

from pathlib import Path

from framework.config import RunConfig
from framework.errors import ConfigError, ScheduleError
from framework.schedule.action import COMPUTE, Schedule, parse_schedule
from framework.schedule.build import build
from framework.schedule.check import check, report
from framework.schedule.lower import lower


def draw_schedule(config: RunConfig) -> Schedule:
    """The schedule that a resolved configuration runs. A file's may be of computations alone, or lowered.

    Raises:
        UserError: it does not fit the degrees, or would hang, lose a micro-batch or compute one twice.
    """
    pipeline, pp, chunks = config.pipeline, config.parallel.pp, config.batch.chunks
    assert chunks is not None, "resolve the configuration first"
    if pipeline.schedule_file is None:
        schedule = lower(build(pipeline.schedule, pp, chunks, pipeline.interleave or pipeline.stages_per_rank))
    else:
        schedule = _from_file(Path(pipeline.schedule_file), pp, chunks)
    problems = check(schedule)
    if problems:
        raise ScheduleError(report(schedule, problems))
    return schedule


def _from_file(path: Path, pp: int, chunks: int) -> Schedule:
    try:
        schedule = parse_schedule(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(
            f"pipeline.schedule_file = {path}: cannot be read ({why}); name a schedule as text"
        ) from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    if (schedule.pp, schedule.chunks) != (pp, chunks):
        raise ScheduleError(
            f"{path} is for pp={schedule.pp} and chunks={schedule.chunks}, but parallel.pp = {pp} and batch.chunks = "
            f"{chunks}: change the one or the other"
        )
    kinds = {action.kind for rank in range(pp) for _, action in schedule.actions(rank)}
    return lower(schedule) if kinds <= COMPUTE else schedule
