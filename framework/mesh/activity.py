"""Current activity of this rank, recorded as each action begins and read by the watchdog thread during a hang.

    main thread    begin(0F3) .. waits(handle) . begin(0F3) .... begin("reading samples") ...      100 ns each
                                   |
    watchdog       ------------- told() ------------------------ told() ---                        now and then

The record is one attribute, replaced as a whole: another thread sees the old one or the new one. Objects are stored
as they are and formatted only when the watchdog reads them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

READING = "reading samples"
BETWEEN = "going from one step to the next"


class Waits(NamedTuple):
    """Operation that a rank is blocked in."""

    how: str
    """``receive``, ``send`` or ``collective``."""
    ranks: tuple[int, ...]
    """Global ranks that must act next; for a collective, all other ranks of its group."""
    operation: str
    """``1RECV_F3``, or ``all-reduce of (3,)``."""
    group: str = ""
    """Name of the collective's group; ``key`` is the group's key in :attr:`Doing.posted`."""
    key: str = ""
    number: int = 0
    """Sequence number of the collective in its group, from 1; 0 for point-to-point."""


class Waiting(Protocol):
    """Protocol of an operation that a rank can block in, and that describes itself."""

    def waits(self) -> Waits:
        """Return a description of the operation. Called by the watchdog thread, rarely."""


class Doing(NamedTuple):
    """Snapshot of a rank's activity, as text."""

    phase: str
    what: str
    for_s: float
    waits: Waits | None
    posted: dict[str, int]
    """Number of collectives that this rank has posted so far, by group key."""


class Activity:
    """Activity record of one rank. One thread calls ``begin`` and ``waits`` all the time; any thread calls ``told``."""

    def __init__(self) -> None:
        self.phase = "starting"
        """Phase of the run: training, validating, saving a checkpoint."""
        self.now: tuple[object, float, Waiting | None] = (self.phase, time.monotonic(), None)
        """Current action, its start in monotonic seconds, and the operation it is blocked in."""
        self.posted: dict[str, int] = {}
        self.waited_s = 0.0
        """Total seconds in which the program was blocked on other ranks. On CUDA mostly only the device waits."""

    def begin(self, what: object) -> None:
        """Record the start of an action; ``str(what)`` is its name."""
        self.waits(None)
        self.now = (what, self.now[1], None)

    def waits(self, handle: Waiting | None) -> None:
        """Record that the current action blocks on ``handle``; None: it continues."""
        what, since_s, before = self.now
        now_s = time.monotonic()
        if before is not None:
            self.waited_s += now_s - since_s
        self.now = (what, now_s, handle)

    def posts(self, key: str) -> int:
        """Count the next collective of a group; return its sequence number, from 1."""
        number = self.posted[key] = self.posted.get(key, 0) + 1
        return number

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase of the run within the block, such as ``validating``, and begin it as an action."""
        before, self.phase = self.phase, phase
        self.begin(phase)
        try:
            yield
        finally:
            self.phase = before
            self.begin(before)

    def told(self) -> Doing:
        """Return a snapshot of the activity as text. Safe from any thread."""
        what, since_s, handle = self.now
        waits = handle.waits() if handle is not None else None
        return Doing(self.phase, str(what), time.monotonic() - since_s, waits, dict(self.posted))
