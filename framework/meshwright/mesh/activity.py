"""The present activity of a rank, recorded as it begins,
for a watchdog thread to read when the rank hangs.

    main thread    begin(0F3) .. waits(handle) . begin(0F3) .... begin("reading samples") ...      100 ns each
                                   |
    watchdog       ----------- snapshot() -------------------- snapshot() -                        now and then

The record is one attribute, replaced as a whole, so that another thread reads either the old or the
new one. Objects are stored as they are, and formatted only when the record is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class Waits(NamedTuple):
    """An operation that blocks a rank, and the ranks that it depends on."""

    how: str
    """``receive``, ``send`` or ``collective``."""
    ranks: tuple[int, ...]
    """Global ranks that must act next; for a collective, all other ranks of its group."""
    operation: str
    """``1RECV_F3``, or ``all-reduce of (3,)``."""
    group: str = ""
    """Name of the group of a collective."""
    key: str = ""
    """Key of that group in :attr:`ActivitySnapshot.posted`."""
    number: int = 0
    """Number of the collective among those of its group, from 1."""


class BlockingOperation(Protocol):
    """A blocking operation with a description."""

    def waits(self) -> Waits:
        """Return the description of the operation. Called by another thread, rarely."""


class ActivitySnapshot(NamedTuple):
    """Activity of a rank at one moment, formatted."""

    phase: str
    what: str
    for_s: float
    waits: Waits | None
    posted: dict[str, int]
    """Number of collectives that this rank has posted so far, by group key."""


class Activity:
    """Recorder of one rank's activity. One thread calls ``begin`` and ``waits``;
    any may call ``snapshot``.
    """

    READING_SAMPLES = "reading samples"
    BETWEEN_STEPS = "going from one step to the next"

    def __init__(self) -> None:
        self.phase = "starting"
        """Phase of the run: training, validating, saving a checkpoint."""
        self.now: tuple[object, float, BlockingOperation | None] = (
            self.phase,
            time.monotonic(),
            None,
        )
        """Activity, start time, and the operation that blocks it."""
        self.posted: dict[str, int] = {}
        self.waited_s = 0.0
        """Total seconds in which the program was blocked on other ranks.
        On CUDA mostly only the device waits.
        """

    def begin(self, what: object) -> None:
        """Record the start of an activity; ``str(what)`` is its name."""
        _, since_s, before = self.now
        now_s = time.monotonic()
        if before is not None:
            self.waited_s += now_s - since_s
        self.now = (what, now_s, None)

    def waits(self, handle: BlockingOperation | None) -> None:
        """Record the operation that blocks the present activity; None: nothing does."""
        what, since_s, before = self.now
        now_s = time.monotonic()
        if before is not None:
            self.waited_s += now_s - since_s
        self.now = (what, now_s, handle)

    def posts(self, key: str) -> int:
        """Count one more collective of a group; return its number."""
        number = self.posted[key] = self.posted.get(key, 0) + 1
        return number

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Run the block as a phase, such as ``validating``,
        which is also the activity until a finer one begins.
        """
        before, self.phase = self.phase, phase
        self.begin(phase)
        try:
            yield
        finally:
            self.phase = before
            self.begin(before)

    def snapshot(self) -> ActivitySnapshot:
        """Return the present activity, formatted."""
        what, since_s, handle = self.now
        waits = handle.waits() if handle is not None else None
        return ActivitySnapshot(
            self.phase, str(what), time.monotonic() - since_s, waits, dict(self.posted)
        )
