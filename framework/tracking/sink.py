"""What a sink is. Nothing else: sinks do not know the tracker, and the tracker does not know which sinks there are."""

from __future__ import annotations

from typing import Protocol

from meshwright.tracking.record import StepRecord


class Sink(Protocol):
    """Takes records. Behind the tracker all its methods run on one thread of its own, in the order written here; they
    may block or raise, and only the sink suffers."""

    def open(self) -> None:
        """Called once, before the first record: the place for what takes time."""

    def write(self, record: StepRecord) -> None:
        """One step. Steps rise."""

    def close(self, failed: bool = False) -> None:
        """Finish. ``failed``: the run ended by an error, or ``open`` or ``write`` of this sink raised."""
