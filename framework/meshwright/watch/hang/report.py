"""Report of a hang: whole for report.txt, short for the message. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshwright.mesh import Grid
from meshwright.watch.hang.diagnosis import MAX_LINES, Verdict, judge, lines, seconds
from meshwright.watch.hang.heartbeat import Heartbeat, ReceivedHeartbeat, describe_activity, place

JUDGE_LIMIT_S = 2.0
"""Seconds after which the ranks and their waits are reported without the cause."""
SOUGHT = "The cause is still sought; the ranks and their waits:"


class HangReport(NamedTuple):
    """First line of a report, the heartbeats, and the ranks to inspect."""

    head: str
    table: Mapping[int, ReceivedHeartbeat]
    grid: Grid
    silent_s: float
    """Age in seconds above which a heartbeat's rank is silent."""
    ranks: tuple[int, ...]
    stuck: tuple[int, ...] = ()
    """See :class:`Verdict`."""

    def with_verdict(self, verdict: Verdict) -> HangReport:
        """Return the report with the cause."""
        return self._replace(
            head=f"{self.head} {verdict.reason}",
            ranks=verdict.ranks or self.ranks,
            stuck=verdict.stuck,
        )

    def whole(self) -> list[str]:
        """Return the lines of report.txt, with all ranks."""
        return [self.head, "", *lines(self.table, self.grid, self.silent_s)]

    def short(self) -> list[str]:
        """Return the lines of the message: of many ranks, those to inspect and some others."""
        return [self.head, *lines(self.table, self.grid, self.silent_s, self.ranks, MAX_LINES)]


def judge_safely(
    report: HangReport, long_s: float, report_late: Callable[[HangReport], object]
) -> Verdict:
    """Find the cause in the heartbeats of a report.

    No report is lost: after JUDGE_LIMIT_S, ``report_late`` is called in another thread with the
    report as it is, and an error of the diagnosis becomes a verdict.
    """
    late = start_timer(JUDGE_LIMIT_S, lambda: report_late(report.with_verdict(Verdict(SOUGHT, ()))))
    try:
        return judge(report.table, report.grid, report.silent_s, long_s)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        return Verdict(
            f"The cause could not be found ({found}): compare the waits and the stacks of the"
            " ranks",
            (),
        )
    finally:
        late.cancel()
        late.join(JUDGE_LIMIT_S)  # its report comes before the one with the cause


def judge_alone(beat: Heartbeat, grid: Grid, silent_s: float) -> Verdict:
    """Return the verdict of a rank that sees its own heartbeat only:
    the store has not responded for ``silent_s``.
    """
    return Verdict(
        f"rank {beat.rank} ({place(grid, beat.rank)}) {describe_activity(beat)}. The key-value"
        f" store through which ranks exchange heartbeats has not responded for {seconds(silent_s)}"
        " either: the process or machine that holds it (rank 0's or the launcher's) is stopped or"
        " gone",
        (beat.rank,),
    )


def start_timer(after_s: float, action: Callable[[], object]) -> threading.Timer:
    """Call a function in another thread after so many seconds, unless the process ends before."""
    timer = threading.Timer(after_s, action)
    timer.daemon = True
    timer.start()
    return timer
