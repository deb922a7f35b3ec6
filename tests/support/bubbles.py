"""Bubble share without the ramp at both ends,
which tests and benchmarks of zero-bubble schedules compare.
"""

from __future__ import annotations

from meshwright.schedule.analysis import Timeline, bubble_share


def own_bubble_share(timeline: Timeline) -> float:
    """Return the largest share of a rank's own time without computation, 0..1:
    0 for zb_h2 and zb_v in ticks.

    A rank's own time is from the start of its first forward to the end of its last backward. It is
    the loss if ranks start and end their steps independently. Here one gradient norm over all ranks
    synchronises the steps, so that the loss is :func:`bubble_share`.
    """
    shares = []
    for rank in timeline.ranks:
        spans = tuple(span for span in timeline.spans if span.rank == rank)
        shares.append(bubble_share(Timeline(timeline.name, spans)))
    return max(shares)
