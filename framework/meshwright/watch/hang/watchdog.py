"""Watchdog: ends a hanging run and reports the rank that blocks it, its operation,
and the ranks that wait for it.

    each rank, every tick      puts its heartbeat into the store (shared key-value pairs): its activity, since when,
                               and the operation that it waits for
    rank 0, every tick         all heartbeats -> runs/NAME/status.json, for `meshwright status`
    the first rank whose       claims the report; all ranks see the claim at their next tick and write the stacks of
    activity is too old        their threads to hang/rank-N.txt
    the claiming rank          watches the heartbeats for three ticks (an unchanged one means a rank that is stopped or
                               gone), prints the cause, writes hang/report.txt, and ends its process
    the other ranks            read the cause from the store and end their processes; a rank that serves the store
                               ends after them

The limit is ``launch.timeout_s``. Process groups time out GROUP_TIMEOUT_MARGIN_S later. A tick is a
tenth of the limit, from 0.5 to 5 s. Each rank has two daemon threads. One uses the store, which may
stop responding. The other checks the first, and reports for this rank alone if it is blocked.

A process that was stopped as a whole and continues is not hanging: time in which the second thread
did not run does not count. Code that holds the GIL forever (an endless loop in C) cannot be
detected from within. The other ranks then receive no heartbeats of that rank, and report it as
silent.

On CUDA the host runs ahead of the device: the activity of a rank is the operation that its host
waits for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.errors import HangEcho, HangError, Preempted, RunFilesError, UserError
from meshwright.mesh.mesh import Mesh
from meshwright.system.process import GiveUp
from meshwright.terminal.output import tell
from meshwright.watch.hang.diagnosis import seconds
from meshwright.watch.hang.disk_writer import DiskWriter
from meshwright.watch.hang.exchange import HeartbeatExchange
from meshwright.watch.hang.heartbeat import MISSED_TICKS, ReceivedHeartbeat
from meshwright.watch.hang.report import HangReport, judge_alone, judge_safely, start_timer
from meshwright.watch.hang.status import RunEnd, Status

GROUP_TIMEOUT_MARGIN_S = 60.0
"""Seconds by which the timeout of process groups exceeds the limit,
so that the watchdog reports first.
"""
MIN_TICK_S, MAX_TICK_S = 0.5, 5.0
MIN_WATCH_S = 3.0
"""Minimum time to watch heartbeats before a report, however short a tick is:
a busy machine may skip one.
"""
EXIT_LIMIT_S = 30.0
"""Seconds after which a reporting process exits in any case: the reader of its output, or the disk,
may hang too.
"""
LINGER_TICKS = 2
"""Ticks for which the process that serves the store waits for other ranks to read the cause."""


def tick_of(limit_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(max(limit_s / 10, MIN_TICK_S), MAX_TICK_S)


class Watchdog:
    """Watchdog of one rank, active within its ``with`` block.
    Its own errors never end a run that makes progress.
    """

    def __init__(
        self,
        mesh: Mesh,
        directory: Path,
        limit_s: float,
        steps: int,
        step: Callable[[], int],
        give_up: GiveUp,
        replace_status: Callable[[str], object],
    ) -> None:
        """Prepare the watchdog; it starts with the ``with`` block.

        Args:
            mesh: the mesh, with this rank's activity and store.
            directory: the run's directory.
            limit_s: seconds without progress after which the run hangs.
            steps: steps of the whole run.
            step: returns the number of steps taken; called by other threads.
            give_up: ends this process with an error, or returns once a recovery ends its waits.
            replace_status: replaces the text of ``status.json`` atomically; called on rank 0, by
                another thread.
        """
        self._mesh = mesh
        self._limit_s = limit_s
        self._steps = steps
        self._step = step
        self._give_up = give_up
        self._run = directory.name
        self._tick_s = tick_of(limit_s)
        self._watched_s = max(MISSED_TICKS * self._tick_s, MIN_WATCH_S)
        self._gap_s = max(MISSED_TICKS * self._tick_s, MAX_TICK_S)
        """Pause of the thread "check" that means that the whole process was stopped (SIGSTOP,
        a suspended machine).
        """
        self._exchange = HeartbeatExchange(mesh, step)
        self._disk = DiskWriter(
            directory, mesh.rank, self._exchange.host, self._warn, replace_status
        )
        self._claimed_s: float | None = None
        """Time when this rank saw another rank's claim."""
        self._ended = threading.Event()
        self._leaving = threading.Event()
        """Set once this process ends with the hang."""
        self._warned = False
        self._awake_s = self._pulse_s = self._round_s = time.monotonic()
        """Monotonic times: start of the process or its last resume; last pass of "check";
        last round of "store".
        """
        self._threads = [
            threading.Thread(target=each, name=f"watchdog-{name}", daemon=True)
            for name, each in (("store", self._run_rounds), ("check", self._check_rounds))
        ]

    def __enter__(self) -> Self:
        self._disk.remove_stacks()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended.set()
        # one that ends this process does; an error here is a consequence of the hang
        for thread in self._threads:
            thread.join(EXIT_LIMIT_S if self._leaving.is_set() else self._tick_s)
        # the directory may belong to another run
        if self._mesh.rank == 0 and not isinstance(error, RunFilesError):
            how = RunEnd(how="finished")
            if error is not None:
                if isinstance(error, UserError):
                    message = str(error)
                else:
                    message = f"{type(error).__name__}: {error}"
                # the store may be gone with the process that held it
                with contextlib.suppress(Exception):
                    # this rank's error is a consequence of the hang
                    message = self._exchange.reason() or message
                how = RunEnd(
                    how="stopped" if isinstance(error, Preempted) else "failed", message=message
                )
            self._exchange.record(self._awake_s)
            self._write_status(how)
        self._disk.flush()

    # -----------------------------------------------------------------------------------------------------
    # each tick

    def _run_rounds(self) -> None:
        """Run the thread that uses the store."""
        while not self._ended.is_set():
            try:
                self._round()
                self._round_s = time.monotonic()
            except Exception as error:
                # the store is gone, or a disk is full: the other thread decides
                self._warn(error)
            self._ended.wait(self._tick_s)

    def _round(self) -> None:
        self._exchange.send(self._awake_s)
        if self._claimed_s is None and self._exchange.is_claimed():
            self._claimed_s = time.monotonic()
            self._disk.write_stacks()
        if self._claimed_s is not None:
            self._wait_for_report(self._claimed_s)
        if self._mesh.rank == 0:
            self._exchange.receive()
            self._write_status()
        # else: next round
        if self._claimed_s is None and self._age_s() > self._limit_s and self._exchange.claim():
            self._watch_and_report()

    def _age_s(self) -> float:
        """Return the seconds without progress on this rank; 0 if this process was just resumed."""
        now = time.monotonic()
        if now - self._pulse_s > self._gap_s:
            return 0.0
        return min(now - self._mesh.activity.now[1], now - self._awake_s)

    def _check_rounds(self) -> None:
        """Run the thread that never blocks: it checks the store's thread,
        and whether the process was stopped.
        """
        while not self._ended.wait(self._tick_s / 2):
            now = time.monotonic()
            if now - self._pulse_s > self._gap_s:  # the whole process did not run
                self._awake_s = self._round_s = now
            self._pulse_s = now
            silent_s = now - self._round_s
            if self._age_s() > self._limit_s and silent_s > 2 * self._watched_s + self._gap_s:
                self._disk.write_stacks()
                self._disk.flush()
                self._report(alone_for_s=silent_s)

    # -----------------------------------------------------------------------------------------------------
    # the report

    def _watch_and_report(self) -> None:
        """Watch the heartbeats for a while,
        then report the hang from this rank and end the process.

        If this rank makes progress meanwhile, it was only slow: the claim is withdrawn.
        """
        began_s = self._mesh.activity.now[1]
        self._disk.write_stacks()
        until_s = time.monotonic() + self._watched_s
        self._exchange.receive()
        while time.monotonic() < until_s and not self._ended.is_set():
            self._ended.wait(self._tick_s / 2)
            self._exchange.send(self._awake_s)
            self._exchange.receive()
            self._round_s = time.monotonic()
        if self._mesh.activity.now[1] == began_s:
            self._report()
        else:
            self._exchange.withdraw_claim()
            self._claimed_s = None

    def _report(self, alone_for_s: float | None = None) -> None:
        """Report the cause to the disk, the other ranks and the launcher, and end this process,
        unless the launcher replaces the stuck ranks.

        ``alone_for_s``: seconds for which the store did not respond; the report then covers this
            rank alone.
        """
        if self._ended.is_set():
            return
        self._leaving.set()
        limit = start_timer(EXIT_LIMIT_S, lambda: os._exit(HangError.exit_code))
        rank = self._mesh.rank
        silent_s = self._watched_s - self._tick_s
        is_alone = alone_for_s is not None
        mine = self._exchange.beat(self._awake_s)
        table = {rank: ReceivedHeartbeat(mine, 0.0)} if is_alone else self._exchange.table(silent_s)
        head = f"the run hangs: nothing has moved on rank {rank} for {seconds(self._age_s())}."
        report = HangReport(head, table, self._mesh.grid, silent_s, (rank,))
        if alone_for_s is None:
            report = report.with_verdict(judge_safely(report, self._limit_s / 2, self._report_late))
        else:
            report = report.with_verdict(judge_alone(mine, self._mesh.grid, alone_for_s))
        on_device = [f"rank {rank}, on the device: {line}" for line in self._disk.unfinished]
        self._disk.write_report([*report.whole(), *on_device], is_alone=is_alone)
        message = [
            *report.short(),
            # elsewhere a rank waits for what it posts
            *(on_device if self._mesh.device.type == "cuda" else ()),
            (
                "the stacks of all ranks that could write them are in"
                f" {self._disk.report_path.parent}. An operation that is long but alive, such as a"
                " save or a first step that compiles, needs a launch.timeout_s above"
                f" {self._limit_s:g}"
            ),
        ]
        if rank == 0:
            self._write_status(RunEnd(how="failed", message=report.head))
        self._disk.flush()
        error = HangError("MW-WATCH-005", "\n".join(message))
        error.stuck, error.for_s = report.stuck, self._age_s()
        if is_alone:
            self._give_up(error)
        else:
            with contextlib.suppress(Exception):
                self._exchange.publish_reason(report.head)
            self._leave(error)
        limit.cancel()  # this process is still needed

    def _report_late(self, report: HangReport) -> None:
        """Report the ranks and their waits while the cause is still sought."""
        self._disk.write_report(report.whole())
        tell("\n".join(report.short()))

    def _leave(self, error: HangError) -> None:
        """End this process; if it serves the store,
        after the other ranks have read the cause there.
        """
        if self._mesh.holds_store():
            silent_s, limit_s = self._watched_s, LINGER_TICKS * self._tick_s
            error.linger = lambda: self._exchange.wait_until_read(silent_s, limit_s)
        self._give_up(error)

    def _wait_for_report(self, claimed_s: float) -> None:
        """End this process once the claiming rank has reported;
        report from this rank if no report appears in time.
        """
        if self._exchange.pop_withdrawal():
            self._claimed_s = None
            return
        reason = self._exchange.reason()
        if reason is not None and not self._ended.is_set():
            self._leaving.set()
            self._exchange.confirm_reason()
            if self._mesh.rank == 0:
                self._write_status(RunEnd(how="failed", message=reason))
            self._disk.flush()
            self._leave(
                HangEcho(
                    "MW-WATCH-006", "ended with the run, which hangs; another rank has reported why"
                )
            )
        elif time.monotonic() - claimed_s > 2 * self._watched_s + self._gap_s:
            self._watch_and_report()

    def _write_status(self, ended: RunEnd | None = None) -> None:
        mesh = self._mesh
        self._disk.write_status(
            Status(
                run=self._run,
                at_s=time.time(),
                tick_s=self._tick_s,
                grid=mesh.grid.degrees,
                step=self._step(),
                steps=self._steps,
                phase=mesh.activity.phase,
                pid=os.getpid(),
                host=self._exchange.host,
                ranks=self._exchange.statuses(),
                ended=ended,
            )
        )

    def _warn(self, error: Exception) -> None:
        """Print the first error of the watchdog; later ones are dropped, and the run continues."""
        if not self._warned and not self._ended.is_set():
            self._warned = True
            tell(f"watchdog: {type(error).__name__}: {error}. The run continues.")
