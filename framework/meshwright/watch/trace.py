"""Trace of one measured step: the spans of every pipeline rank on one clock,
in a file for `meshwright draw`.

    all ranks           barriers, and a reading of the clock after each
    all ranks           the step
    each pipeline       gather of spans, data reads, start of the row
    rank 0              traces/step-00000005.json with the spans of its pipeline, written atomically

On one machine all processes read the same monotonic clock. Clocks of several machines are aligned
by their readings after the same barriers; ``clock_error_s`` in the file is the largest deviation of
these. No error here stops a run: a trace that cannot be written is reported on stderr.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

from meshwright.schedule.analysis import Reading, Span
from meshwright.system.atomic import write_atomic

MAX_STEP = 2**63


class Trace(BaseModel):
    """Contents of a trace file. Times are seconds since the first rank began its row,
    on the clock of pp rank 0.
    """

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
    """Return the step to trace: the ``trace_step``-th after ``steps_taken``, or the last step;
    None for 0.

    A resumed run is traced again, because its layout may have changed.
    """
    return min(steps_taken + trace_step, steps) if trace_step > 0 else None


def on_one_clock(
    pipeline: Sequence[RankSpans],
) -> tuple[tuple[Span, ...], tuple[Reading, ...], float]:
    """Return (spans, data reads, clock error), in seconds since the first rank began its row.

    ``pipeline``: by pp rank. The clock error bounds the difference between the clocks of two hosts.
    """
    offsets, error_s = clock_offsets(pipeline)
    begin = min(
        rank_spans.start_s - offset for rank_spans, offset in zip(pipeline, offsets, strict=True)
    )
    spans: list[Span] = []
    readings: list[Reading] = []
    for rank, (rank_spans, offset) in enumerate(zip(pipeline, offsets, strict=True)):
        start = rank_spans.start_s - offset - begin
        spans += [
            Span(rank, span.action, start + span.start, start + span.end)
            for span in rank_spans.spans
        ]
        readings += [Reading(rank, start + first, start + last) for first, last in rank_spans.data]
    return tuple(spans), tuple(readings), error_s


def clock_offsets(pipeline: Sequence[RankSpans]) -> tuple[list[float], float]:
    """Return (seconds by which each rank's clock is ahead of the first rank's,
    largest deviation of one barrier).

    Ranks of one host share a clock. All ranks leave a barrier at about the same time. Without a
    cluster-wide clock nothing more exact is available.
    """
    first = pipeline[0]
    differences: dict[str, list[float]] = defaultdict(list)
    for each in pipeline:
        if each.host != first.host:
            differences[each.host] += [
                tick - base for tick, base in zip(each.ticks, first.ticks, strict=True)
            ]
    offsets = {host: median(values) for host, values in differences.items()}
    errors = (
        abs(value - offsets[host]) for host, values in differences.items() for value in values
    )
    return [offsets.get(each.host, 0.0) for each in pipeline], max(errors, default=0.0)


def write(trace: Trace, path: Path) -> None:
    """Write a trace atomically."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, trace.model_dump_json() + "\n", is_durable=False)
