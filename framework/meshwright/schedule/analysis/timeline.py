"""Timelines of one step, simulated or measured, and their summaries: bubble, peak activations,
waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from meshwright.schedule.action import (
    COMPLETES_BACKWARD,
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
)


class Span(NamedTuple):
    """An action of the pipeline rank ``rank`` with its start and end,
    in seconds or ticks of one clock.
    """

    rank: int
    action: Action
    start: float
    end: float
    beside: Action | None = None
    """Other computation of a pair. Their joint time is divided into two consecutive spans."""


class Timeline(NamedTuple):
    """One step in time, simulated or measured, of all or some pipeline ranks."""

    name: str
    spans: tuple[Span, ...]
    """Spans of each rank, in the order of execution."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline ranks that have spans."""
        return tuple(sorted({span.rank for span in self.spans}))


class Reading(NamedTuple):
    """The time in which the pipeline rank ``rank`` read samples, on the clock of a timeline."""

    rank: int
    start: float
    end: float


def bubble_share(timeline: Timeline) -> float:
    """Return the share of the ranks' total time without computation, 0..1: (pp-1) / (chunks+pp-1)
    for 1F1B, GPipe.

    Total time (not the ideal time, the literature's other denominator) is from the first forward's
    start to the last backward's end, times the ranks of the timeline. Waiting and communication
    count as idle; REDUCE and STEP are left out.
    """
    computed = [span for span in timeline.spans if span.action.kind in COMPUTE]
    assert computed, f"{timeline.name}: nothing computed in {len(timeline.spans)} spans"
    total = (max(span.end for span in computed) - min(span.start for span in computed)) * len(
        timeline.ranks
    )
    busy = sum(span.end - span.start for span in computed)
    return (total - busy) / total if total > 0 else 0.0


def peak_activations(of: Schedule | Timeline) -> tuple[int, ...]:
    """Return the most micro-batches per rank whose activations it holds at once: from F to B or,
    split, to W.

    A micro-batch counts once per stage of the rank. ``min(pp - rank, chunks)`` for 1F1B, ``chunks``
    for GPipe.
    """
    if isinstance(of, Schedule):
        return tuple(_most_held(action for _, action in of.actions(rank)) for rank in range(of.pp))
    return tuple(
        _most_held(span.action for span in of.spans if span.rank == rank) for rank in of.ranks
    )


def _most_held(actions: Iterable[Action]) -> int:
    held = most = 0
    for action in actions:
        if action.kind is Kind.F:
            held += 1
            most = max(most, held)
        elif action.kind in COMPLETES_BACKWARD:
            held -= 1
    return most


def bubbles(timeline: Timeline) -> list[tuple[Span, float]]:
    """Return each span with the part of it that it waited because another rank was not ready."""
    started = {(span.rank, span.action): span.start for span in timeline.spans}
    sent = {action: start for (_, action), start in started.items() if action.kind in SENDS}  # (1)
    # (2)
    all_here = max(
        (start for (_, action), start in started.items() if action.kind is Kind.STEP), default=0.0
    )

    def ready(action: Action) -> float:
        if action.kind in RECEIVES:
            return sent.get(action.partner(), 0.0)
        return all_here if action.kind is Kind.STEP else 0.0

    return [
        (span, min(max(ready(span.action) - span.start, 0.0), span.end - span.start))
        for span in timeline.spans
    ]


def on_their_way(timeline: Timeline, at_least: float = 0.0) -> dict[tuple[int, int], float]:
    """Return (sender, receiver) -> time that the receiver waited for messages in flight, without
    ``at_least`` of each wait.
    """
    sent = {span.action: span for span in timeline.spans if span.action.kind in SENDS}
    in_flight: dict[tuple[int, int], float] = defaultdict(float)
    for span, bubble in bubbles(timeline):
        if span.action.kind in RECEIVES:
            waited = span.end - span.start - bubble
            in_flight[sent[span.action.partner()].rank, span.rank] += max(waited - at_least, 0.0)
    return dict(in_flight)


def name_of(schedule: Schedule) -> str:
    """Return a name such as ``1f1b pp=4 chunks=8``."""
    interleave = f" interleave={schedule.interleave}" if schedule.interleave > 1 else ""
    return f"{schedule.name} pp={schedule.pp} chunks={schedule.chunks}{interleave}"
