"""Captions and scale of a drawn schedule or timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from meshwright.schedule.action import COMPUTE, Kind
from meshwright.schedule.analysis import Span, Timeline, bubble_share, peak_activations

_MAX_ROWS = 16


def caption(timeline: Timeline) -> str:
    """Return a caption such as ``1f1b pp=4 chunks=8: bubble 27.3 % of total time;
    activations in flight 4 3 2 1``.
    """
    peaks = elide([str(peak) for peak in peak_activations(timeline)])
    share = 100 * bubble_share(timeline)
    return (
        f"{timeline.name}: bubble {share:.1f} % of total time; activations in flight"
        f" {' '.join(peaks)}"
    )


def typical_shortest(spans: Iterable[Span]) -> float:
    """Return the duration drawn as one cell: the median of the quickest kind of computation.

    It is at least a quarter of the slowest kind's median, so that a very short W does not stretch
    all other boxes.
    """
    durations: dict[Kind, list[float]] = defaultdict(list)
    for span in spans:
        if span.action.kind in COMPUTE:
            durations[span.action.kind].append(span.end - span.start)
    medians = [median(of_kind) for of_kind in durations.values()]
    longest = max(max(of_kind) for of_kind in durations.values())
    return max(min(medians), max(medians) / 4) or longest


def elide(names: list[str]) -> list[str]:
    """Abridge a list of more than 16 names to its first and last eight."""
    half = _MAX_ROWS // 2
    return names if len(names) <= _MAX_ROWS else [*names[:half], "…", *names[-half:]]
