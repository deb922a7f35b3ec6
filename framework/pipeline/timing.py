"""Clocks for a row of a schedule: on the GPU the program is far ahead of what it has asked for."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """``read`` now, ``resolve`` later: on CUDA a reading is an event that has yet to happen."""

    start_s: float
    """time.perf_counter() at the start of the row: one clock for all processes of a machine."""

    def read(self) -> Any:
        """The time, as of this point of the program."""

    def resolve(self, reading: Any) -> float:
        """A reading in seconds from the start; may block until it has happened."""


class CpuClock:
    """Reads the time at which the program is."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()

    read = staticmethod(time.perf_counter)
    """Called a few times per action."""

    def resolve(self, reading: float) -> float:
        """Seconds from the start of the row."""
        return reading - self.start_s


class CudaClock:
    """Records events on the current stream, read after the row has run."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record()

    def read(self) -> torch.cuda.Event:
        """An event at this point of the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def resolve(self, reading: torch.cuda.Event) -> float:
        """Seconds from the start of the row to the event; blocks until it has happened."""
        reading.synchronize()
        return float(self._start.elapsed_time(reading)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
