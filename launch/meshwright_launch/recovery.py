"""A rank's side of recoveries in place (``watch.mirror``): a dead rank is replaced, and the other
processes stay.

    coordinator    orders a new process for rank 3, announces generation 1 (coordinator.py)
    other ranks    their collectives fail, or a thread aborts them when it sees the announcement;
                   they close their groups and free their memory
    all ranks      rendezvous of generation 1, mesh, build, resume from the mirror, train
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.config import RunConfig
from meshwright.errors import HangEcho, HangError, Preempted, UserError
from meshwright.mesh.mesh import abort_groups, leave_mesh
from meshwright.mesh.rendezvous import DEFAULT_PORT
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.run.mirror import Mirror
from meshwright.system.host import shut_connections
from meshwright.system.numbers import MAX_INT64, MAX_PORT, MAX_RANKS, environment_number
from meshwright.system.process import GiveUp, StopRequest, leave
from meshwright_launch.failure import has_lost_peer
from meshwright_launch.rank import GENERATION, MIRROR
from meshwright_launch.recovery_notes import (
    MAX_MESSAGE,
    HangVerdict,
    announced,
    changes,
    note_store,
)

POLL_S = 0.1
"""Interval in seconds in which a rank looks for an announcement."""
POLL_S_PER_RANK = 0.001
"""Part of it for each rank of the run: all of them read from one store."""
LOST_PEER_S = 20.0
"""Time for the coordinator to announce a generation after a rank has lost a peer: it notices a dead
machine after a few seconds.
"""
HANG_S = 5.0
"""Time for it to announce one after a report of a hang."""
KILL_S = 60.0
"""Time for the agent to kill a process that another one replaces."""


class Rejoin:
    """A rank's side of recoveries."""

    def __init__(self, generation: int, mirror: Path, configured: RunConfig) -> None:
        """Connect to the coordinator's store. ``configured``: the run as it is started again, whatever
        layout is in use.
        """
        self.generation = generation
        self.mirror = mirror
        self.configured = configured
        self.is_new = True
        """False: this process has taken part in an earlier generation."""
        self._next = generation
        """Generation that this rank is to join."""
        self._request = StopRequest()
        self._has_handlers = False
        self._rank = environment_number("RANK", 0, high=MAX_RANKS)
        num_ranks = environment_number("WORLD_SIZE", 1, 1, MAX_RANKS)
        self._poll_s = max(POLL_S, POLL_S_PER_RANK * num_ranks)
        self._notes = note_store(_connect())
        self.report("left")  # a process that replaces another has nothing to leave

    @staticmethod
    def from_environment(configured: RunConfig) -> Rejoin | None:
        """Return this rank's side; None: the launcher does not recover in place."""
        mirror = os.environ.get(MIRROR)
        if mirror is None:
            return None
        return Rejoin(environment_number(GENERATION, 0, high=MAX_INT64), Path(mirror), configured)

    def open_store(self) -> Any:
        """Return the store for the rendezvous of this generation; None: that of the environment.

        Keys of an earlier generation are not seen: they name sockets of processes that are gone.
        """
        if self.generation == 0:
            return None
        return dist.PrefixStore(f"generation-{self.generation}", _connect())  # type: ignore[attr-defined]

    def open_request(self) -> contextlib.nullcontext[StopRequest]:
        """Handle signals from the first generation on to the end of this process: one that arrives
        between two generations is kept too.
        """
        if not self._has_handlers:
            self._request.__enter__()
            self._has_handlers = True
        return contextlib.nullcontext(self._request)

    def report(self, phase: str) -> None:
        """Report that this rank has completed a phase of its start or of a recovery."""
        key = f"{phase}/{self.generation}"
        self._notes.set(f"{key}/{self._rank}", "")
        self._notes.add(key, 1)

    def report_step(self, step: int) -> None:
        """Report the first step of this generation."""
        if self._rank == 0:
            self._notes.set(f"step/{self.generation}", str(step))
        self.report("stepped")

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """End this rank's collectives within the block with an error when a new generation is announced."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(self._poll_s):
                newest = announced(self._notes)
                if newest > self.generation:
                    later = changes(self._notes, self.generation, newest)
                    # NOTE [gloo's abort]: it does not end a call that waits for a peer. A dead process is
                    # no matter: its machine resets the connection. A dead machine sends nothing
                    shut_connections({address for change in later for address in change.lost})
                    abort_groups()
                    return

        thread = threading.Thread(target=watch, name="recovery", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def after_hang(self, give_up: GiveUp) -> GiveUp:
        """Return the handler of a report of a hang: ranks that it names as stuck are replaced, and
        this process stays; otherwise ``give_up`` ends it.
        """
        generation = self.generation

        def report(error: UserError) -> None:
            limit_s = HANG_S if isinstance(error, HangEcho) else 0.0
            if isinstance(error, HangError) and error.stuck:
                limit_s = HANG_S
                message = str(error).encode("utf-8", "replace").decode()[:MAX_MESSAGE]
                verdict = HangVerdict(ranks=error.stuck, message=message, for_s=error.for_s)
                self._notes.set(f"hang/{generation}", verdict.model_dump_json())
            if self._wait_for_generation(generation, limit_s) == generation:
                give_up(error)

        return report

    def observers(self, parts: Parts) -> list[Observer]:
        """Return the observers of a run that recovers in place. Collective over all ranks;
        blocks.
        """
        return [Mirror(parts, self.mirror, self.generation), FirstStep(self.report_step)]

    def is_wanted(self, error: Exception) -> bool:
        """Return True if the coordinator has announced a generation that this rank is to join after
        ``error``; waits for it if the rank has lost a peer.

        Does not return in a process that another one replaces.
        """
        if isinstance(error, Preempted):
            return False
        limit_s = LOST_PEER_S if has_lost_peer(error) else 0.0
        self._next = self._wait_for_generation(self.generation, limit_s)
        later = changes(self._notes, self.generation, self._next)
        if any(self._rank in change.replaced for change in later):
            leave(1, KILL_S)
        return self._next > self.generation

    def leave(self) -> None:
        """Close the groups of the generation before, free its memory and take the new number."""
        leave_mesh()
        gc.collect()  # parts refer to each other in circles
        self.generation, self.is_new = self._next, False
        self.report("left")

    def _wait_for_generation(self, after: int, limit_s: float) -> int:
        """Return the newest generation, once it is a later one or the time is over."""
        deadline_s = time.monotonic() + limit_s
        while (newest := announced(self._notes)) <= after and time.monotonic() < deadline_s:
            time.sleep(self._poll_s / 2)
        return newest


class FirstStep(Observer):
    """Observer that reports the first step of a generation."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Report the first step."""
        if event.is_first:
            self._report(parts.state.step)


def _connect() -> Any:
    """Return a connection of its own to the coordinator's store."""
    port = environment_number("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT)
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
