"""Watchdog: ends a hanging run and reports the rank that blocks it, its operation, and the ranks that wait for it.

    each rank, every tick      puts its heartbeat on the board (a shared key-value store): its activity, since when,
                               and the operation that it waits for
    rank 0, every tick         all heartbeats -> runs/NAME/status.json, for `meshwright status`
    the first rank whose       claims the report; all ranks see the claim at their next tick and write the stacks of
    activity is too old        their threads to hang/rank-N.txt
    the claiming rank          watches the heartbeats for three ticks (an unchanged one means a rank that is stopped or
                               gone), prints the cause, writes hang/report.txt, and ends its process
    the other ranks            read the cause from the board and end their processes

The limit is ``launch.timeout_s``. Process groups wait LATER_S longer before they fail by themselves. A tick is a tenth
of the limit, from 0.5 to 5 s. Each rank has two daemon threads. One uses the board, which may stop responding. The
other checks the first, and reports for this rank alone if it is blocked.

A process that was stopped as a whole and continues is not hanging: time in which the second thread did not run does not
count. Code that holds Python's GIL for good (an endless loop in C) cannot be watched from within. The other ranks then
receive no heartbeats of that rank, and report it as silent.

On CUDA the host runs ahead of the device: the activity of a rank is the operation that its host waits for.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.errors import HangEcho, HangError, Preempted, RunFilesError, UserError
from meshwright.mesh.mesh import Mesh
from meshwright.system.process import GiveUp
from meshwright.terminal.output import tell
from meshwright.watch.hang.diagnosis import MOST_LINES, Verdict, judge, lines, seconds
from meshwright.watch.hang.disk_writer import DiskWriter
from meshwright.watch.hang.heartbeat import (
    MISSED,
    Ended,
    Heartbeat,
    RankStatus,
    ReceivedHeartbeat,
    Status,
    Waited,
    does,
    place,
)

LATER_S = 60.0
"""Seconds by which the timeout of process groups exceeds the limit, so that the watchdog reports first."""
SHORTEST_TICK_S, LONGEST_TICK_S = 0.5, 5.0
LEAST_WATCHED_S = 3.0
"""Minimum time to watch heartbeats before a report, however short a tick is: a busy machine may skip one."""
LAST_WORDS_S = 30.0
"""Seconds after which a reporting process exits in any case: the reader of its output, or the disk, may hang too."""
CLAIM, SAID, OVER = "hang/claim", "hang/said", "hang/over"


def tick_of(limit_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(max(limit_s / 10, SHORTEST_TICK_S), LONGEST_TICK_S)


class Watchdog:
    """Watchdog of one rank, active within its ``with`` block. Its own errors never end a run that makes progress."""

    def __init__(
        self, mesh: Mesh, status_file: Path, limit_s: float, steps: int, step: Callable[[], int], give_up: GiveUp
    ) -> None:
        """Prepare the watchdog; it starts with the ``with`` block.

        Args:
            mesh: the mesh, with this rank's activity and board.
            status_file: status.json in the run's directory.
            limit_s: seconds without progress after which the run hangs.
            steps: steps of the whole run.
            step: returns the number of steps taken; called by other threads.
            give_up: ends this process with an error.
        """
        self._mesh = mesh
        self._limit_s = limit_s
        self._steps = steps
        self._step = step
        self._give_up = give_up
        self._tick_s = tick_of(limit_s)
        self._watched_s = max(MISSED * self._tick_s, LEAST_WATCHED_S)
        self._board = self._mesh.open_store()
        self._host = socket.gethostname()
        self._num_beats = 0
        self._heard: dict[int, tuple[Heartbeat, float]] = {}
        """Last heartbeat of each rank, and the time when it arrived here (monotonic clock, s)."""
        self._claimed_s: float | None = None
        self._num_claims = 0
        """Number of withdrawn claims: the claiming rank was only slow and made progress again."""
        self._ended = threading.Event()
        self._run = status_file.parent.name
        self._disk = DiskWriter(status_file, mesh.rank, self._host, self._warn)
        self._warned = False
        now = time.monotonic()
        self._began_s = self._awake_s = self._pulse_s = self._round_s = now
        self._threads = [
            threading.Thread(target=each, name=f"watchdog-{name}", daemon=True)
            for name, each in (("talk", self._talk), ("look", self._look))
        ]

    def __enter__(self) -> Self:
        self._disk.forget_stacks()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(self._tick_s)
        if self._mesh.rank == 0 and not isinstance(error, RunFilesError):  # the directory may belong to another run
            how = Ended(how="finished")
            if error is not None:
                message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                message = self._said() or message  # the error of this rank is then a consequence of the hang
                how = Ended(how="stopped" if isinstance(error, Preempted) else "failed", message=message)
            self._heard[0] = (self._beat(), time.monotonic())
            self._write_status(how)

    def _said(self) -> str | None:
        """Return the cause of a hang that another rank has reported, or None."""
        with contextlib.suppress(Exception):  # the board may be gone with the process that held it
            return self._board.read([SAID]).get(SAID) if self._board is not None else None
        return None

    # ----------------------------------------------------------------------------------------------------- each tick

    def _talk(self) -> None:
        """Run the thread that uses the board."""
        while not self._ended.is_set():
            try:
                self._round()
                self._round_s = time.monotonic()
            except Exception as error:  # the board is gone, or a disk is full: the other thread decides
                self._warn(error)
            self._ended.wait(self._tick_s)

    def _round(self) -> None:
        mine = self._beat()
        self._heard[mine.rank] = (mine, time.monotonic())
        if self._board is not None:
            self._board.put(f"beat/{mine.rank}", mine.model_dump_json())
            if self._claimed_s is None and self._board.has(self._claim()):
                self._claimed_s = time.monotonic()
                self._disk.write_stacks()
            if self._claimed_s is not None:
                self._wait_for_the_report()
        if self._mesh.rank == 0:
            self._listen()
            self._write_status()
        hangs = self._claimed_s is None and self._age_s() > self._limit_s
        if hangs and (self._board is None or self._board.is_first(self._claim())):  # else: next round
            self._report()

    def _beat(self) -> Heartbeat:
        doing = self._mesh.activity.told()
        self._num_beats += 1
        return Heartbeat(
            rank=self._mesh.rank,
            beat=self._num_beats,
            step=self._step(),
            phase=doing.phase,
            what=doing.what,
            for_s=round(max(0.0, min(doing.for_s, time.monotonic() - self._awake_s)), 3),
            waits=None if doing.waits is None else Waited(**doing.waits._asdict()),
            posted=doing.posted,
            pid=os.getpid(),
            host=self._host,
            at_s=time.time(),
        )

    def _age_s(self) -> float:
        """Return the seconds without progress on this rank; 0 if this process was just resumed."""
        now = time.monotonic()
        if now - self._pulse_s > self._gap_s():
            return 0.0
        return min(now - self._mesh.activity.now[1], now - self._awake_s)

    def _gap_s(self) -> float:
        return max(MISSED * self._tick_s, LONGEST_TICK_S)

    def _look(self) -> None:
        """Run the thread that never blocks: it checks the board's thread, and whether the process was stopped."""
        while not self._ended.wait(self._tick_s / 2):
            now = time.monotonic()
            if now - self._pulse_s > self._gap_s():  # the whole process did not run
                self._awake_s = self._round_s = now
            self._pulse_s = now
            silent_s = now - self._round_s
            if self._age_s() > self._limit_s and silent_s > 2 * self._watched_s + self._gap_s():
                self._disk.write_stacks()
                self._speak(alone_for_s=silent_s)

    def _listen(self) -> None:
        """Read the heartbeats of the other ranks."""
        if self._board is None:
            return
        found = self._board.read([f"beat/{rank}" for rank in range(self._mesh.grid.size) if rank != self._mesh.rank])
        now = time.monotonic()
        for text in found.values():
            beat = Heartbeat.model_validate_json(text)
            known = self._heard.get(beat.rank)
            if known is None or known[0].beat != beat.beat:
                self._heard[beat.rank] = (beat, now)

    def _table(self, silent_s: float) -> dict[int, ReceivedHeartbeat]:
        now = time.monotonic()
        table = dict.fromkeys(range(self._mesh.grid.size), ReceivedHeartbeat(None, now - self._began_s))
        for rank, (beat, heard_s) in self._heard.items():
            quiet_s = now - heard_s
            if quiet_s > silent_s:  # it may have been read here only once, and be much older
                quiet_s = max(quiet_s, time.time() - beat.at_s)
            table[rank] = ReceivedHeartbeat(beat, quiet_s)
        return table

    # ----------------------------------------------------------------------------------------------------- the report

    def _claim(self) -> str:
        return f"{CLAIM}/{self._num_claims}"

    def _report(self) -> None:
        """Watch the heartbeats for a while, then report the hang from this rank and end the process.

        If this rank makes progress meanwhile, it was only slow: the claim is withdrawn.
        """
        stood_since_s = self._mesh.activity.now[1]
        self._disk.write_stacks()
        until_s = time.monotonic() + self._watched_s
        self._listen()
        while time.monotonic() < until_s and not self._ended.is_set():
            self._ended.wait(self._tick_s / 2)
            mine = self._beat()
            self._heard[mine.rank] = (mine, time.monotonic())
            if self._board is not None:
                self._board.put(f"beat/{mine.rank}", mine.model_dump_json())
            self._listen()
            self._round_s = time.monotonic()
        if self._mesh.activity.now[1] == stood_since_s:
            self._speak()
        elif self._board is not None:
            self._board.put(f"{OVER}/{self._num_claims}", "it goes on")
            self._claim_is_over()

    def _claim_is_over(self) -> None:
        self._num_claims += 1
        self._claimed_s = None

    def _speak(self, alone_for_s: float | None = None) -> None:
        """Report the cause to the disk, the other ranks and the launcher, and end this process.

        ``alone_for_s``: seconds for which the board did not respond; the report then covers this rank alone.
        """
        if self._ended.is_set():
            return
        last = threading.Timer(LAST_WORDS_S, os._exit, (HangError.exit_code,))
        last.daemon = True
        last.start()
        grid, silent_s, mine = self._mesh.grid, self._watched_s - self._tick_s, self._beat()
        if alone_for_s is None:
            table = self._table(silent_s)
            verdict = judge(table, grid, silent_s, self._limit_s / 2)
        else:
            table = {mine.rank: ReceivedHeartbeat(mine, 0.0)}
            reason = (
                f"rank {mine.rank} ({place(grid, mine.rank)}) {does(mine)}. Nor has the store answered, through which "
                f"ranks hear of each other, for {seconds(alone_for_s)}: the process or machine that holds it (rank 0's "
                f"or the launcher's) is stopped or gone"
            )
            verdict = Verdict(reason, (mine.rank,))
        head = f"the run hangs: nothing has moved on rank {mine.rank} for {seconds(self._age_s())}. {verdict.reason}"
        whole = [head, "", *lines(table, grid, silent_s)]
        self._disk.write_report(whole)
        place_of_stacks = self._disk.report_place.parent
        message = "\n".join(
            [
                head,
                *lines(table, grid, silent_s, verdict.ranks, MOST_LINES),
                f"the stacks of all ranks that could write them are in {place_of_stacks}. What is long but alive, such "
                f"as a save or a first step that compiles, needs a launch.timeout_s above {self._limit_s:g}",
            ]
        )
        if self._mesh.rank == 0:
            self._write_status(Ended(how="failed", message=head))
        if self._board is not None and alone_for_s is None:
            with contextlib.suppress(Exception):
                self._board.put(SAID, head)
        self._give_up(HangError("MW-WATCH-005", message))

    def _wait_for_the_report(self) -> None:
        """End this process once the claiming rank has reported; report from this rank if no report appears in time."""
        assert self._board is not None and self._claimed_s is not None
        over = f"{OVER}/{self._num_claims}"
        found = self._board.read([SAID, over])
        said = found.get(SAID)
        if over in found:
            self._claim_is_over()
        elif said is not None and not self._ended.is_set():
            if self._mesh.rank == 0:
                self._write_status(Ended(how="failed", message=said))
            self._give_up(HangEcho("MW-WATCH-006", "ended with the run, which hangs; another rank has told why"))
        elif time.monotonic() - self._claimed_s > 2 * self._watched_s + self._gap_s():
            self._report()

    def _write_status(self, ended: Ended | None = None) -> None:
        mesh = self._mesh
        heard: Mapping[int, tuple[Heartbeat, float]] = dict(self._heard)
        now = time.monotonic()
        status = Status(
            run=self._run,
            at_s=time.time(),
            tick_s=self._tick_s,
            grid=(mesh.grid.pp, mesh.grid.dp, mesh.grid.tp),
            step=self._step(),
            steps=self._steps,
            phase=mesh.activity.phase,
            pid=os.getpid(),
            host=self._host,
            ranks=tuple(
                RankStatus(silent_s=round(max(0.0, now - heard[rank][1]), 3), beat=heard[rank][0])
                for rank in sorted(heard)
            ),
            ended=ended,
        )

        self._disk.write_status(status)

    def _warn(self, error: Exception) -> None:
        """Print the first error of the watchdog; later ones are dropped, and the run continues."""
        if not self._warned and not self._ended.is_set():
            self._warned = True
            tell(f"watchdog: {type(error).__name__}: {error}. The run goes on.")
