"""What this rank does right now, told as it begins, for a thread that looks when nothing moves any more.

    main thread    begin(0F3) .. waits(handle) . begin(0F3) .... begin("reading samples") ...      100 ns each
                                   |
    watchdog       ------------- told() ------------------------ told() ---                        now and then

What is told is one attribute, replaced as a whole: another thread sees the one before or the one after. Objects are
kept as they are and put into words when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

READING = "reading samples"
BETWEEN = "going from one step to the next"


class Waits(NamedTuple):
    """What a rank waits for."""

    how: str
    """``receive``, ``send`` or ``collective``."""
    ranks: tuple[int, ...]
    """Global: who has to do something. Of a collective: all the others of its group."""
    operation: str
    """``1RECV_F3``, or ``all-reduce of (3,)``."""
    group: str = ""
    """Of a collective: the name of the group, and which one it is in :attr:`Doing.posted`."""
    key: str = ""
    number: int = 0
    """Of a collective: which it is of this group's, from 1."""


class Waiting(Protocol):
    """Something that can be waited for, and can tell what that is."""

    def waits(self) -> Waits:
        """Asked by another thread, rarely."""


class Doing(NamedTuple):
    """What a rank does, in words."""

    phase: str
    what: str
    for_s: float
    waits: Waits | None
    posted: dict[str, int]
    """Collectives of each group that this rank has come to so far."""


class Activity:
    """One rank's. ``begin`` and ``waits`` are called all the time, by one thread; ``told`` by any."""

    def __init__(self) -> None:
        self.phase = "starting"
        """What the run is about: training, validating, saving a checkpoint."""
        self.now: tuple[object, float, Waiting | None] = (self.phase, time.monotonic(), None)
        """What, since when, and what it waits for."""
        self.posted: dict[str, int] = {}
        self.waited_s = 0.0
        """In which the program has waited for others, in all; on CUDA only the device waits for most of them."""

    def begin(self, what: object) -> None:
        """From now on this rank does that: ``str(what)`` is its name."""
        self.waits(None)
        self.now = (what, self.now[1], None)

    def waits(self, handle: Waiting | None) -> None:
        """From now on it waits for something while it does what it does; None: it goes on."""
        what, since_s, before = self.now
        now_s = time.monotonic()
        if before is not None:
            self.waited_s += now_s - since_s
        self.now = (what, now_s, handle)

    def posts(self, key: str) -> int:
        """It has come to the next collective of a group; which one that is."""
        number = self.posted[key] = self.posted.get(key, 0) + 1
        return number

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A part of the run, such as ``validating``: what is done until something finer begins."""
        before, self.phase = self.phase, phase
        self.begin(phase)
        try:
            yield
        finally:
            self.phase = before
            self.begin(before)

    def told(self) -> Doing:
        """In words."""
        what, since_s, handle = self.now
        waits = handle.waits() if handle is not None else None
        return Doing(self.phase, str(what), time.monotonic() - since_s, waits, dict(self.posted))
