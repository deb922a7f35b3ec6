"""Trace of one measured step: the spans of every pipeline rank on one clock, in a file for `meshwright draw`.

    all ranks           barriers, and a reading of the clock after each
    all ranks           the step
    each pipeline       gather of spans, data reads, start of the row
    rank 0              traces/step-00000005.json with the spans of its pipeline, written atomically

On one machine all processes read the same monotonic clock. Clocks of several machines are aligned by their readings
after the same barriers; ``clock_error_s`` in the file is the largest deviation of these. No error here stops a run: a
trace that cannot be written is reported on stderr.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, ValidationError

from meshwright.errors import DataError, ScheduleError
from meshwright.schedule.action import COMPUTE, Action, Schedule
from meshwright.schedule.analysis import Reading, Span, Timeline, name_of
from meshwright.schedule.load import parse_schedule
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import read_bytes

MAX_STEP_S = 1e7
"""Upper limit of a time in a trace, in seconds: four months."""
MAX_STEP = 2**63
FILE_NAME = re.compile(r"step-(\d{8,})\.json")


class Trace(BaseModel):
    """Contents of a trace file. Times are seconds since the first rank began its row, on the clock of pp rank 0."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["meshwright trace 1"] = "meshwright trace 1"
    run: str
    step: Annotated[int, Field(ge=0, lt=MAX_STEP)]
    torch: str
    device: str
    hosts: tuple[str, ...]
    """Host name of each pipeline rank."""
    clock_error_s: NonNegativeFloat
    """Largest error between times of different hosts, in seconds; 0 on one host."""
    schedule: str = Field(min_length=1)
    """Schedule in its text form."""
    spans: tuple[tuple[NonNegativeInt, str, float, float], ...] = Field(min_length=1)
    """(pipeline rank, action, start, end), for each rank in order of execution."""
    data: tuple[tuple[NonNegativeInt, float, float], ...]
    """(pipeline rank, start, end) of each read of samples."""


class LoadedTrace(NamedTuple):
    """A trace read from a file and checked against its schedule."""

    trace: Trace
    schedule: Schedule
    timeline: Timeline
    readings: tuple[Reading, ...]


class RankSpans(NamedTuple):
    """Measurements of one pipeline rank in one step: clock readings, spans and data reads."""

    host: str
    ticks: tuple[float, ...]
    """``time.perf_counter()`` after each barrier."""
    start_s: float
    """``time.perf_counter()`` at the start of the row."""
    spans: tuple[Span, ...]
    data: tuple[tuple[float, float], ...]


def traced_step(trace_step: int, steps_taken: int, steps: int) -> int | None:
    """Return the step to trace: the ``trace_step``-th after ``steps_taken``, or the last step; None for 0.

    A resumed run is traced again, because its layout may have changed.
    """
    return min(steps_taken + trace_step, steps) if trace_step > 0 else None


def on_one_clock(pipeline: Sequence[RankSpans]) -> tuple[tuple[Span, ...], tuple[Reading, ...], float]:
    """Return (spans, data reads, clock error), in seconds since the first rank began its row.

    ``pipeline``: by pp rank. The clock error bounds the difference between the clocks of two hosts.
    """
    offsets, error_s = clock_offsets(pipeline)
    begin = min(rank_spans.start_s - offset for rank_spans, offset in zip(pipeline, offsets, strict=True))
    spans: list[Span] = []
    readings: list[Reading] = []
    for rank, (rank_spans, offset) in enumerate(zip(pipeline, offsets, strict=True)):
        start = rank_spans.start_s - offset - begin
        spans += [Span(rank, span.action, start + span.start, start + span.end) for span in rank_spans.spans]
        readings += [Reading(rank, start + first, start + last) for first, last in rank_spans.data]
    return tuple(spans), tuple(readings), error_s


def clock_offsets(pipeline: Sequence[RankSpans]) -> tuple[list[float], float]:
    """Return (seconds by which each rank's clock is ahead of the first rank's, largest deviation of one barrier).

    Ranks of one host share a clock. All ranks leave a barrier at about the same time. Without a cluster-wide clock
    nothing more exact is available.
    """
    first = pipeline[0]
    differences: dict[str, list[float]] = defaultdict(list)
    for each in pipeline:
        if each.host != first.host:
            differences[each.host] += [tick - base for tick, base in zip(each.ticks, first.ticks, strict=True)]
    offsets = {host: median(values) for host, values in differences.items()}
    errors = (abs(value - offsets[host]) for host, values in differences.items() for value in values)
    return [offsets.get(each.host, 0.0) for each in pipeline], max(errors, default=0.0)


def write(trace: Trace, path: Path) -> None:
    """Write a trace atomically."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, trace.model_dump_json() + "\n", is_durable=False)


def newest(run_directory: Path) -> Path:
    """Return the path of a run's newest trace.

    Raises:
        DataError: the run has no trace.
    """
    traces = run_directory / "traces"
    found = [path for path in traces.glob("*.json") if FILE_NAME.fullmatch(path.name) and path.is_file()]
    if not found:
        raise DataError(
            "MW-WATCH-009",
            f"{run_directory} has no trace (traces/step-*.json): name the directory of a run that has taken the step "
            f"that tracking.trace_step names (0 traces none), or a configuration to draw its schedule",
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
            "MW-WATCH-011", f"{path} is no trace of a step: {why}. Train again, or draw another trace"
        ) from None
    trace = trace.model_copy(
        update={
            "spans": tuple((rank, action, _rounded(start), _rounded(end)) for rank, action, start, end in trace.spans),
            "data": tuple((rank, _rounded(start), _rounded(end)) for rank, start, end in trace.data),
        }
    )
    known = {(rank, str(action)): action for rank in range(schedule.pp) for _, action in schedule.actions(rank)}
    problem = _contradiction(trace, schedule, known)
    if problem is not None:
        raise DataError("MW-WATCH-012", f"{path} is no trace of a step: {problem}. Train again, or draw another trace")
    spans = tuple(Span(rank, known[rank, action], start, end) for rank, action, start, end in trace.spans)
    readings = tuple(Reading(*each) for each in trace.data)
    return LoadedTrace(trace, schedule, Timeline(name_of(schedule), spans), readings)


def _rounded(time_s: float) -> float:
    """Round a time to picoseconds, so that no ratio of two durations overflows."""
    return round(time_s, 12)


def _contradiction(trace: Trace, schedule: Schedule, known: dict[tuple[int, str], Action]) -> str | None:
    times = [*(time for *_, start, end in trace.spans for time in (start, end)), trace.clock_error_s]
    times += [time for _, start, end in trace.data for time in (start, end)]
    if max(map(abs, times)) > MAX_STEP_S:
        return f"it has a time of {max(times, key=abs):g} s, and no step takes more than {MAX_STEP_S:g} s"
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
    if not any(end > start and known[rank, name].kind in COMPUTE for rank, name, start, end in trace.spans):
        return "no computation in it takes any time"
    if len(trace.hosts) != schedule.pp:
        return f"{len(trace.hosts)} hosts of {schedule.pp} pipeline ranks"
    return None
