"""Recorder that reports the progress of a long dry run."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.schedule.action import Action
from meshwright_plan.dryrun.recorder import StepRecorder

EVERY_S = 10.0
"""Seconds between two lines."""


class ReportingRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Recorder of a step that reports its activity every few seconds,
    so that a long run is not silent.
    """

    def __init__(self, report: Callable[[str], None], pp_rank: int, pp: int) -> None:
        """Start the clock; ``report`` receives the lines."""
        super().__init__()
        self._report, self._where = report, f"pipeline rank {pp_rank} of {pp}"
        self._begin = self._last = time.monotonic()

    def begin_activity(self, activity: object) -> None:
        """Record the start of an activity, and report it if the last line is old."""
        super().begin_activity(activity)
        now = time.monotonic()
        if now - self._last >= EVERY_S and isinstance(activity, Action):
            self._last = now
            self._report(f"{self._where}: {activity} after {now - self._begin:,.0f} s")
