"""Links (directed pairs of pipeline ranks) that a schedule uses."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.schedule.action import SENDS, Schedule


def links_of(schedules: Iterable[Schedule]) -> set[tuple[int, int]]:
    """Return (source, destination) of all messages of lowered schedules, as pipeline ranks."""
    return {
        (rank, schedule.peer(action))
        for schedule in schedules
        for rank in range(schedule.pp)
        for _, action in schedule.actions(rank)
        if action.kind in SENDS
    }
