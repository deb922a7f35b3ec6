"""Chrome trace of a timeline: JSON for ui.perfetto.dev, chrome://tracing and speedscope.

    process   a panel ("measured", "simulated")
    threads   rank 0, and below it "rank 0 sends", "rank 0 data": one of each per pipeline rank
    slices    an action with its stage and micro-batch, waiting for a message, samples read       "X"
    arrows    from a send to the computation that used the message                               "s" -> "f"

Times are microseconds. A tick becomes a millisecond, so that events without duration are visible.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from meshwright.schedule.analysis import Span
from meshwright_plan.picture.panel import Panel, Unit

MICROSECONDS = {Unit.TICKS: 1e3, Unit.SECONDS: 1e6}
MIN_US = 1.0
"""Least length of a send: a slice without length would be invisible."""
TRACKS = ("", " sends", " data")
"""Threads of each rank: its actions in order, the sends it has posted, its reading of samples."""

Event = dict[str, Any]


def chrome_trace(panels: Sequence[Panel], unit: Unit = Unit.TICKS) -> str:
    """Return the JSON trace, one process per panel."""
    events: list[Event] = []
    for pid, panel in enumerate(panels, start=1):
        events += _process(pid, panel, MICROSECONDS[unit])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _process(pid: int, panel: Panel, scale: float) -> list[Event]:
    timeline = panel.timeline
    events = [
        _metadata("process_name", pid, 0, name=panel.caption or timeline.name),
        _metadata("process_sort_index", pid, 0, sort_index=pid),
    ]
    for rank in timeline.ranks:
        for track, name in enumerate(TRACKS):
            tid = _tid(rank, track)
            if track < TRACKS.index(" data") or any(span.rank == rank for span in panel.readings):
                events.append(_metadata("thread_name", pid, tid, name=f"rank {rank}{name}"))
                events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
    start = min(span.start for span in timeline.spans)

    def slice_(
        rank: int, track: int, name: str, kind: str, begin: float, end: float, **args: object
    ) -> Event:
        ts, dur = (begin - start) * scale, (end - begin) * scale
        at = {"pid": pid, "tid": _tid(rank, track)}
        return {"ph": "X", "name": name, "cat": kind, "ts": ts, "dur": dur, **at, "args": args}

    for span in timeline.spans:
        action, begin, end = span.action, span.start, span.end
        is_send, args = (
            action.kind in SENDS,
            {"stage": action.stage, "microbatch": action.microbatch},
        )
        if is_send:
            end = max(end, begin + MIN_US / scale)
        elif end <= begin:
            continue  # a message that had already arrived, or a reduction without duration
        name = f"wait for {action}" if action.kind in RECEIVES else str(action)
        events.append(slice_(span.rank, int(is_send), name, str(action.kind), begin, end, **args))
    for read in panel.readings:
        events.append(
            slice_(read.rank, TRACKS.index(" data"), "read samples", "data", read.start, read.end)
        )
    for number, (send, user) in enumerate(_messages(timeline.spans)):
        both = {"name": "message", "cat": "message", "id": f"{pid}.{number}", "pid": pid}
        sent_us, used_us = (send.start - start) * scale, (user.start - start) * scale
        events.append({**both, "ph": "s", "ts": sent_us, "tid": _tid(send.rank, 1)})
        events.append({**both, "ph": "f", "bp": "e", "ts": used_us, "tid": _tid(user.rank, 0)})
    return events


def _messages(spans: Iterable[Span]) -> Iterable[tuple[Span, Span]]:
    """Yield each send with the computation that used its message."""
    spans = list(spans)
    computed = {
        span.action: span for span in spans if span.action.kind in COMPUTE and span.end > span.start
    }
    for span in spans:
        if span.action.kind in SENDS:
            received = span.action.partner()
            users = (Kind.F,) if received.kind is Kind.RECV_F else (Kind.B, Kind.I)
            for kind in users:
                user = computed.get(Action(kind, received.stage, received.microbatch))
                if user is not None:
                    yield span, user


def _tid(rank: int, track: int) -> int:
    return rank * len(TRACKS) + track + 1


def _metadata(event: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}
