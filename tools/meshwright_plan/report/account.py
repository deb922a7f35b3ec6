"""Accounting of a measured step: the time of each rank by cause,
and the costs to simulate the same step.

    rank r    |data|--wait for F--|==F==|..|--wait for B--|===B===| REDUCE |--STEP---|
                        |                                                      |
                        (1) its sender sends                                   (2) the last rank arrives
                        before: waiting, after: communication                  before: waiting, after: the optimizer

Waiting before (1) and (2) is the bubble: a step ends for all ranks together, since the optimizer
begins with all-reduces over them. Waiting for other ranks of a tensor-parallel group, or for other
replicas in a reduction, is not visible in the spans of one replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from meshwright.schedule.action import COMPUTE, RECEIVES, SENDS, Kind, Schedule
from meshwright.schedule.analysis import Costs, Reading, Timeline, bubble_share, bubbles, simulate
from meshwright.terminal.format import format_table
from meshwright_plan.picture.panel import Panel
from meshwright_plan.report.trace_file import LoadedTrace


class Account(NamedTuple):
    """Time of one rank by cause, in the timeline's unit;
    all but ``rank`` sum to the step's time.
    """

    rank: int
    compute: float
    waiting: float
    """Bubble: waits for a message that was not yet sent,
    or for the other ranks of an all-reduce.
    """
    communication: float
    """Exposed communication: waits for a message that was already sent,
    and the posting of messages.
    """
    reduce: float
    optimizer: float
    data: float
    """Reads of samples."""
    other: float
    """Time outside of all spans: Python between the actions."""

    @property
    def total(self) -> float:
        """The step's time."""
        return sum(self[1:])


class TracedStep(NamedTuple):
    """Panels of a traced step: as it was, and simulated."""

    measured: Panel
    simulated: Panel

    @property
    def bubble_percents(self) -> tuple[float, float]:
        """Bubble of total time of both, in percent."""
        return 100 * bubble_share(self.measured.timeline), 100 * bubble_share(
            self.simulated.timeline
        )


PARTS = Account._fields[1:]
"""Parts of a rank's time, in the order of their colours."""


def account(timeline: Timeline, readings: Iterable[Reading] = ()) -> tuple[Account, ...]:
    """Return the time of each rank by cause, from 0 (or an earlier first span)
    to the end of the last span.
    """
    begin = min(0.0, *(span.start for span in timeline.spans))
    total = max(span.end for span in timeline.spans) - begin
    sums: dict[int, dict[str, float]] = {rank: defaultdict(float) for rank in timeline.ranks}
    posted: dict[int, set[tuple[float, float]]] = defaultdict(set)
    for span, bubble in bubbles(timeline):
        sums[span.rank]["waiting"] += bubble
        if span.action.kind in SENDS:  # those posted together have one span each, of the same time
            posted[span.rank].add((span.start, span.end))
        else:
            sums[span.rank][_COLUMNS[span.action.kind]] += span.end - span.start - bubble
    for rank, spans in posted.items():
        sums[rank]["communication"] += sum(end - start for start, end in spans)
    for reading in readings:
        sums[reading.rank]["data"] += reading.end - reading.start
    for parts in sums.values():
        parts["other"] = total - sum(parts.values())
    return tuple(Account(rank, *(parts[name] for name in PARTS)) for rank, parts in sums.items())


_COLUMNS = {
    **dict.fromkeys(COMPUTE, "compute"),
    **dict.fromkeys(RECEIVES, "communication"),
    Kind.REDUCE: "reduce",
    Kind.STEP: "optimizer",
}


def without_early_steps(timeline: Timeline) -> Timeline:
    """Shorten STEP spans to begin when the last rank arrives, for a picture:
    the time before is idle.
    """
    return timeline._replace(
        spans=tuple(
            span._replace(start=span.start + bubble) if span.action.kind is Kind.STEP else span
            for span, bubble in bubbles(timeline)
        )
    )


def measured_costs(schedule: Schedule, timeline: Timeline) -> tuple[Costs, ...]:
    """Return the median duration of each kind per stage without its bubble,
    as :func:`simulate` takes them.

    The time of a message is that from the start of its send to the end of its receive, if the
    receiver was already
    waiting: the median over such messages of the sending stage; 0 without any. A rank's optimizer
        time is spread over
    its stages.
    """
    durations: dict[tuple[int | None, Kind], list[float]] = defaultdict(list)
    messages: dict[int | None, list[float]] = defaultdict(list)
    steps: dict[int, float] = {}
    sends = {span.action: span for span in timeline.spans if span.action.kind in SENDS}
    for span, bubble in bubbles(timeline):
        length = span.end - span.start - bubble
        durations[span.action.stage, span.action.kind].append(length)
        if span.action.kind is Kind.STEP:
            steps[span.rank] = length / len(schedule.stages_of(span.rank))
        elif span.action.kind in RECEIVES and span.start <= sends[span.action.partner()].start:
            messages[span.action.partner().stage].append(length)

    def of(stage: int, kind: Kind) -> float:
        return _median(durations[stage, kind])

    return tuple(
        Costs(
            f=of(stage, Kind.F),
            b=of(stage, Kind.B),
            i=of(stage, Kind.I),
            w=of(stage, Kind.W),
            comm=_median(messages[stage]),
            reduce=of(stage, Kind.REDUCE),
            step=steps[schedule.rank_of(stage)],
        )
        for stage in range(schedule.num_stages)
    )


def beside_simulation(traced: LoadedTrace) -> TracedStep:
    """Return a traced step beside the simulation of its schedule with its own costs,
    both named for a picture.
    """
    trace, schedule, timeline, readings = traced
    measured = without_early_steps(timeline)._replace(
        name=f"measured, step {trace.step}: {timeline.name}"
    )
    simulated = simulate(schedule, measured_costs(schedule, timeline))._replace(
        name=f"simulated: {timeline.name}"
    )
    return TracedStep(Panel(measured, readings=readings), Panel(simulated))


def table(accounts: Sequence[Account], size: float, unit: str) -> str:
    """Format a table: a line per rank, the mean, and the shares.
    ``unit`` is ``size`` units of the timeline.
    """
    rows: list[tuple[str, ...]] = [("rank", *PARTS, "total")]
    mean = mean_account(accounts)
    for name, each in zip(
        [*(str(each.rank) for each in accounts), "mean"], [*accounts, mean], strict=True
    ):
        rows.append((name, *(f"{value / size:.2f}" for value in (*each[1:], each.total))))
    rows.append(("share", *(f"{value / mean.total:.1%}" for value in (*mean[1:], mean.total))))
    return "\n".join(
        [f"where the time of the step went, in {unit}", *format_table(rows, ">" * len(rows[0]))]
    )


def mean_account(accounts: Sequence[Account]) -> Account:
    """Return the mean over the ranks, with rank -1."""
    return Account(
        -1, *(sum(column) / len(accounts) for column in list(zip(*accounts, strict=True))[1:])
    )


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
