"""Protocol of a sink. Sinks do not depend on the tracker, and the tracker does not depend on concrete sinks."""

from __future__ import annotations

from typing import Protocol

from meshwright.tracking.record import StepRecord


class Sink(Protocol):
    """Consumer of records. Behind the tracker its methods run on one thread of its own, in the order written here.

    They may block or raise; only this sink is affected.
    """

    def open(self) -> None:
        """Open the sink, once, before the first record. Slow work belongs here."""

    def write(self, record: StepRecord) -> None:
        """Write the record of one step. Steps increase."""

    def close(self, failed: bool = False) -> None:
        """Finish. ``failed``: the run ended with an error, or ``open`` or ``write`` of this sink raised."""
