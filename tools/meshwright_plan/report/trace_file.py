"""Trace file of a run: the newest one, read and checked against its own schedule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from meshwright.errors import DataError, ScheduleError
from meshwright.schedule.action import COMPUTE, Action, Schedule
from meshwright.schedule.analysis import Reading, Span, Timeline, name_of
from meshwright.schedule.load import parse_schedule
from meshwright.system.bounded import read_bytes
from meshwright.watch.trace import Trace

MAX_STEP_S = 1e7
"""Upper limit of a time in a trace, in seconds: four months."""
FILE_NAME = re.compile(r"step-(\d{8,})\.json")


class LoadedTrace(NamedTuple):
    """A trace read from a file and checked against its schedule."""

    trace: Trace
    schedule: Schedule
    timeline: Timeline
    readings: tuple[Reading, ...]


def newest(run_directory: Path) -> Path:
    """Return the path of a run's newest trace.

    Raises:
        DataError: the run has no trace.
    """
    traces = run_directory / "traces"
    found = [
        path for path in traces.glob("*.json") if FILE_NAME.fullmatch(path.name) and path.is_file()
    ]
    if not found:
        raise DataError(
            "MW-WATCH-009",
            f"{run_directory} has no trace (traces/step-*.json): name the directory of a run that"
            " has taken the step that tracking.trace_step names (0 traces none), or a"
            " configuration to draw its schedule",
        )
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def read(path: Path) -> LoadedTrace:
    """Read a trace and check it against its own schedule.

    Raises:
        DataError: the file cannot be read, is no trace, or contradicts itself.
    """
    try:
        trace = Trace.model_validate_json(read_bytes(path))
        schedule = parse_schedule(trace.schedule)
    except OSError as error:
        raise DataError("MW-WATCH-010", f"{path}: cannot be read ({error.strerror})") from error
    except (ValidationError, ScheduleError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        where = ".".join(map(str, first["loc"])) if first else "schedule"
        why = f"{where or 'the file'}: {first['msg'] if first else error}"
        raise DataError(
            "MW-WATCH-011",
            f"{path} is no trace of a step: {why}. Train again, or draw another trace",
        ) from None
    trace = trace.model_copy(
        update={
            "spans": tuple(
                (rank, action, _rounded(start), _rounded(end))
                for rank, action, start, end in trace.spans
            ),
            "data": tuple(
                (rank, _rounded(start), _rounded(end)) for rank, start, end in trace.data
            ),
        }
    )
    known = {
        (rank, str(action)): action
        for rank in range(schedule.pp)
        for _, action in schedule.actions(rank)
    }
    problem = _contradiction(trace, schedule, known)
    if problem is not None:
        raise DataError(
            "MW-WATCH-012",
            f"{path} is no trace of a step: {problem}. Train again, or draw another trace",
        )
    spans = tuple(
        Span(rank, known[rank, action], start, end) for rank, action, start, end in trace.spans
    )
    readings = tuple(Reading(*each) for each in trace.data)
    return LoadedTrace(trace, schedule, Timeline(name_of(schedule), spans), readings)


def _rounded(time_s: float) -> float:
    """Round a time to picoseconds, so that no ratio of two durations overflows."""
    return round(time_s, 12)


def _contradiction(
    trace: Trace, schedule: Schedule, known: dict[tuple[int, str], Action]
) -> str | None:
    times = [
        *(time for *_, start, end in trace.spans for time in (start, end)),
        trace.clock_error_s,
    ]
    times += [time for _, start, end in trace.data for time in (start, end)]
    if max(map(abs, times)) > MAX_STEP_S:
        return (
            f"it has a time of {max(times, key=abs):g} s, and no step takes more than"
            f" {MAX_STEP_S:g} s"
        )
    for rank, action, start, end in trace.spans:
        if (rank, action) not in known:
            return f"its schedule has no {action} on rank {rank}"
        if end < start:
            return f"{action} on rank {rank} ends before it starts ({start} .. {end})"
    missing = known.keys() - {(rank, action) for rank, action, _, _ in trace.spans}
    if missing:
        rank, action = min(missing)
        return f"{action} of rank {rank} is missing"
    if len(trace.spans) > len(known):
        return f"{len(trace.spans)} spans of {len(known)} actions"
    if any(rank >= schedule.pp or end < start for rank, start, end in trace.data):
        return "its data spans are not of its ranks, or end before they start"
    if not any(
        end > start and known[rank, name].kind in COMPUTE for rank, name, start, end in trace.spans
    ):
        return "no computation in it takes any time"
    if len(trace.hosts) != schedule.pp:
        return f"{len(trace.hosts)} hosts of {schedule.pp} pipeline ranks"
    return None
