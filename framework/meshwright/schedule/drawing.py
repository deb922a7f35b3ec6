"""Schedules and timelines as text for a terminal: a row per rank, time from left to right,
idle as dots.

    1f1b pp=4 chunks=8: bubble 27.3 % of total time; activations in flight 4 3 2 1
    rank 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
    rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7 .

Communication is not drawn; its time appears as idle dots. :mod:`figure` makes SVG and PNG,
:mod:`perfetto` traces.
"""

from __future__ import annotations

from meshwright.schedule.action import COMMUNICATION, COMPUTE, Action, Kind, Schedule
from meshwright.schedule.analysis import Timeline, timeline_of
from meshwright.schedule.captions import caption, elide, typical_shortest

_MARGIN = " … "
MAX_COLUMNS = 100_000
"""Columns of a row beyond which its middle is abridged."""


def text(drawn: Schedule | Timeline, width: int = 100) -> str:
    """Draw the rows, no line longer than ``width``: middle columns, and middle ranks beyond 16,
    are abridged to ``…``.

    A schedule, lowered or not, is drawn in ticks, F as long as B. In a timeline a column is a fixed
    time: the label of a short span is cut, a span of no length is not drawn, and a long one is
    filled with dashes.
    """
    timeline = timeline_of(drawn) if isinstance(drawn, Schedule) else drawn
    rows = elide([f"rank {rank}" for rank in timeline.ranks])
    prefix = max(len(name) for name in rows)
    bodies = dict(
        zip(
            (f"rank {rank}" for rank in timeline.ranks),
            _bodies(timeline, width - prefix - 3),
            strict=True,
        )
    )
    lines = [
        f"{name:<{prefix}} | {bodies[name]}".rstrip() if name in bodies else name for name in rows
    ]
    title = caption(timeline)
    return "\n".join([title if len(title) <= width else title[: width - 1] + "…", *lines])


def _bodies(timeline: Timeline, width: int) -> list[str]:
    """Return one string per rank, all of one length."""
    shown = [
        span
        for span in timeline.spans
        if span.action.kind not in COMMUNICATION and span.end > span.start
    ]
    has_many_stages = any(
        len(
            {
                span.action.stage
                for span in shown
                if span.rank == rank and span.action.kind is Kind.F
            }
        )
        > 1
        for rank in timeline.ranks
    )
    cell = 1 + max(len(_label(span.action, has_many_stages)) for span in shown)
    start = min(span.start for span in timeline.spans)
    columns_per_time = cell / typical_shortest(shown)
    num_columns = int((max(span.end for span in shown) - start) * columns_per_time + 0.5)
    # one cost dwarfs all others: a smaller scale, in which those others vanish
    if num_columns > MAX_COLUMNS:
        columns_per_time *= MAX_COLUMNS / num_columns
        num_columns = MAX_COLUMNS
    bodies = {rank: [".", *" " * (cell - 1)] * (num_columns // cell + 1) for rank in timeline.ranks}
    for span in shown:
        first, end = (
            int((time - start) * columns_per_time + 0.5) for time in (span.start, span.end)
        )
        bodies[span.rank][first:end] = _painted(
            _label(span.action, has_many_stages), end - first, cell
        )
    return [
        _middle_out("".join(bodies[rank][:num_columns]), cell, width) for rank in timeline.ranks
    ]


def _painted(label: str, width: int, cell: int) -> str:
    """Draw one span: ``F0`` and blanks in about a cell, ``B0---`` and a blank in more,
    the label cut in less.
    """
    return f"{label:-<{width - 1}} " if width > cell + 1 else f"{label:<{width}}"[:width]


def _label(action: Action, has_many_stages: bool) -> str:
    if action.kind not in COMPUTE:
        return str(action.kind)[0]  # R of REDUCE, S of STEP: they have no micro-batch, F B I W do
    return str(action) if has_many_stages else str(action._replace(stage=None))


def _middle_out(body: str, cell: int, width: int) -> str:
    """Abridge a row that is too long to its first and last cells,
    which show the pipeline fill and drain.
    """
    if len(body.rstrip()) <= width:
        return body
    keep = (width - len(_MARGIN)) // cell // 2 * cell
    return body[:keep] + _MARGIN + body[-keep:]
