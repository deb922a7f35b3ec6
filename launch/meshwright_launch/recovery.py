"""Recovery in place (``watch.mirror``): a dead rank is replaced, and the other processes stay.

    launcher       rank 3 was ended by SIGKILL: forks another process for it, announces generation 1
    other ranks    their collectives fail, or a thread aborts them when it sees the announcement;
                   they close their groups and free their memory
    all ranks      rendezvous of generation 1, mesh, build, resume from the mirror, train
    launcher       all ranks have taken a step: the recovery is complete, and recorded

What fails before it is complete, or does not come in time, is not repaired again: the launcher kills
all ranks and starts them anew, from the same mirror. Each failure counts as one of
``launch.max_restarts``. After the last one, or three in a row at the same step, a failure is handled
as without a mirror (restarts.py), and the ranks again resume from it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.errors import Preempted
from meshwright.mesh.mesh import abort_groups, leave_mesh
from meshwright.mesh.rendezvous import DEFAULT_PORT
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.run.mirror import Mirror
from meshwright.system.atomic import append_synced
from meshwright.system.numbers import MAX_INT64, MAX_PORT, environment_number
from meshwright.system.process import StopRequest
from meshwright.terminal.output import tell
from meshwright_launch.failure import RankFailed, has_lost_peer
from meshwright_launch.mirror_place import MirrorPlace
from meshwright_launch.rank import GENERATION, MIRROR
from meshwright_launch.restarts import MAX_FUTILE_RESTARTS, log_failure

RECOVERIES = "recoveries.jsonl"
"""File of a run's directory with a line for each recovery."""
PREFIX = "recovery"
PHASES = ("left", "groups", "built", "restored", "stepped")
"""Phases of a recovery that each rank reports to the launcher, in order."""
POLL_S = 0.1
"""Interval in seconds in which a rank looks for an announcement."""
LOST_PEER_S = 10.0
"""Time for the launcher to announce a generation after a rank has lost a peer."""
LEAVE_S = 20.0
"""Time for the ranks to leave their step; those that do not are killed."""
REPLACED_EXIT_CODES = (1,)
"""Exit codes that a replacement may get past, besides deaths by a signal."""


class Rejoin:
    """A rank's side of recoveries."""

    def __init__(self, generation: int, mirror: Path) -> None:
        """Connect to the launcher's store."""
        self.generation = generation
        self.mirror = mirror
        self.is_new = True
        """False: this process has taken part in an earlier generation."""
        self.request = StopRequest()
        """Request to stop: one for all generations, so that a recovery forgets none."""
        self._rank = os.environ["RANK"]
        self._notes = _note_store(_connect())
        self.report("left")  # a process that replaces another has nothing to leave

    @staticmethod
    def from_environment() -> Rejoin | None:
        """Return this rank's side; None: the launcher does not recover in place."""
        mirror = os.environ.get(MIRROR)
        if mirror is None:
            return None
        return Rejoin(environment_number(GENERATION, 0, high=MAX_INT64), Path(mirror))

    def open_store(self) -> Any:
        """Return the store for the rendezvous of this generation; None: that of the environment.

        Keys of an earlier generation are not seen: they name sockets of processes that are gone.
        """
        if self.generation == 0:
            return None
        return dist.PrefixStore(f"generation-{self.generation}", _connect())  # type: ignore[attr-defined]

    def report(self, phase: str) -> None:
        """Report that this rank has completed a phase of its start or of a recovery."""
        self._notes.set(f"{phase}/{self.generation}/{self._rank}", repr(time.monotonic()))

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """End this rank's collectives within the block with an error when a new generation is announced."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_S):
                if _announced(self._notes) > self.generation:
                    abort_groups()
                    return

        thread = threading.Thread(target=watch, name="recovery", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def observers(self, parts: Parts) -> list[Observer]:
        """Return the observers of a run that recovers in place. Collective over all ranks;
        blocks.
        """
        return [Mirror(parts, self.mirror, self.generation), FirstStep(self.report)]

    def is_wanted(self, error: Exception) -> bool:
        """Return True if the launcher has announced a generation that this rank is to join after
        ``error``; waits for it if the rank has lost a peer.
        """
        if isinstance(error, Preempted):
            return False
        limit_s = time.monotonic() + (LOST_PEER_S if has_lost_peer(error) else 0.0)
        while _announced(self._notes) == self.generation:
            if time.monotonic() > limit_s:
                return False
            time.sleep(POLL_S / 2)
        return True

    def leave(self) -> None:
        """Close the groups of the generation before, free its memory and take the new number."""
        leave_mesh()
        gc.collect()  # parts refer to each other in circles
        self.generation, self.is_new = _announced(self._notes), False
        self.report("left")


class FirstStep(Observer):
    """Observer that reports the first step of a generation."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Report the first step."""
        if event.is_first:
            self._report("stepped")


class RankReplacer:
    """The launcher's side of recoveries."""

    def __init__(
        self,
        store: Any,
        start: Callable[[int, int], Any],
        num_ranks: int,
        limit: int,
        directory: Path,
        place: MirrorPlace,
    ) -> None:
        """Recover at most ``limit`` times.

        Args:
            store: rendezvous store of the launcher.
            start: function of a rank and a generation that forks its process.
            directory: directory of the run.
            place: the mirror, and the numbers of earlier launches.
        """
        self._place = place
        self._notes = _note_store(store)
        self._notes.add("generation", place.generation)
        self._start = start
        self._num_ranks = num_ranks
        self._limit = limit
        self._directory = directory
        self._begun_s: float | None = None
        self._what = ""
        self._killed: set[int] = set()
        """Ranks that were killed because they did not leave their step."""

    @property
    def is_pending(self) -> bool:
        """True from a failure until all ranks have taken a step again."""
        return self._begun_s is not None

    def is_possible(self, exit_codes: Iterable[int]) -> bool:
        """Return True if processes that ended with these codes are to be replaced."""
        place = self._place
        is_transient = all(code < 0 or code in REPLACED_EXIT_CODES for code in exit_codes)
        is_futile = place.futile >= MAX_FUTILE_RESTARTS
        return is_transient and not is_futile and place.recoveries < self._limit

    def replace(self, ranks: list[Any], failed: Sequence[int], failure: RankFailed) -> list[int]:
        """Fork new processes for the failed ranks, in ``ranks``; announce the next generation.
        Return the ranks that have new processes.

        All ranks are replaced if some have not met since the start or the last recovery: they wait
        in a rendezvous that nothing can end. ``failure``: for the log of failures.
        """
        place, is_own_kill = self._place, set(failed) <= self._killed
        if is_own_kill:
            self._what = f"rank {failed[0]} did not leave its step within {LEAVE_S:g} s"
        else:
            self._what = _describe(failed, failure)
            log_failure(failure, self._directory)
            place.count_failure(place.newest_step())
        has_met = len(self._times("groups")) == self._num_ranks
        replaced = list(failed) if has_met and not self.is_pending else list(range(len(ranks)))
        for rank in replaced:
            ranks[rank].kill()
            ranks[rank].join()
        self._killed.clear()
        place.generation += 1
        self._begun_s = time.monotonic()
        tell(
            f"meshwright: {self._what}; {_how(len(replaced), len(ranks))}, recovery"
            f" {place.recoveries} of {self._limit}"
        )
        for rank in replaced:
            ranks[rank] = self._start(rank, place.generation)
        self._notes.add("generation", 1)
        return replaced

    def check(self, ranks: Sequence[Any]) -> None:
        """Complete a pending recovery if all ranks have taken a step; kill those that are stuck in
        the step before.
        """
        assert self._begun_s is not None
        if len(self._times("stepped")) == self._num_ranks:
            self._complete()
            return
        if time.monotonic() - self._begun_s > LEAVE_S:
            came = self._times("left")
            for rank, process in enumerate(ranks):
                if rank not in came and process.is_alive():
                    self._killed.add(rank)
                    process.kill()

    def _complete(self) -> None:
        """Print and record the times of the recovery."""
        assert self._begun_s is not None
        seconds = {
            phase: round(max(self._times(phase).values()) - self._begun_s, 3) for phase in PHASES
        }
        self._begun_s = None
        times = ", ".join(f"{phase} {value:.2f} s" for phase, value in seconds.items())
        tell(f"meshwright: recovered: {times} after the failure was seen")
        line = {
            "at": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            "generation": self._place.generation,
            "what": self._what,
            **{f"{phase}_s": value for phase, value in seconds.items()},
        }
        with contextlib.suppress(OSError):
            append_synced(self._directory / RECOVERIES, (json.dumps(line) + "\n").encode())

    def _times(self, phase: str) -> dict[int, float]:
        """Return the time at which each rank has completed a phase of this generation."""
        keys = {rank: f"{phase}/{self._place.generation}/{rank}" for rank in range(self._num_ranks)}
        return {
            rank: float(self._notes.get(key))
            for rank, key in keys.items()
            if self._notes.check([key])
        }


def _describe(failed: Sequence[int], failure: RankFailed) -> str:
    """Return the first line of a failure, and how many more ranks have failed with it."""
    first, more = str(failure).splitlines()[0], len(failed) - 1
    return first + (f", and {more} more rank{'s' * (more > 1)} with it" if more else "")


def _how(num_replaced: int, num_ranks: int) -> str:
    """Return what becomes of the processes."""
    return "all ranks start anew" if num_replaced == num_ranks else "replaced in place"


def _connect() -> Any:
    """Return a connection of its own to the launcher's store."""
    port = environment_number("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT)
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def _note_store(store: Any) -> Any:
    return dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]


def _announced(notes: Any) -> int:
    """Return the newest generation that the launcher has announced."""
    return int(notes.add("generation", 0))
