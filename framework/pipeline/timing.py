"""Timers for schedule actions; on CUDA they use events, because launches are asynchronous."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Clock with readings that are resolved later: on CUDA a reading is an event that the device has yet to reach."""

    start_s: float
    """``time.perf_counter()`` at the start of the row, in seconds: one clock for all processes of a machine."""

    def read(self) -> Any:
        """Return a reading of the time at this point of the program."""

    def resolve(self, reading: Any) -> float:
        """Return a reading in seconds from the start of the row; may block until the device has reached it."""


class CpuClock:
    """Clock of the host program."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()

    read = staticmethod(time.perf_counter)
    """Reader of the time, called a few times per action."""

    def resolve(self, reading: float) -> float:
        """Return a reading in seconds from the start of the row."""
        return reading - self.start_s


class CudaClock:
    """Clock of the current CUDA stream: records events, resolved after the row has run."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record()

    def read(self) -> torch.cuda.Event:
        """Record and return an event at this point of the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def resolve(self, reading: torch.cuda.Event) -> float:
        """Return the seconds from the start of the row to the event; block until the device has reached it."""
        reading.synchronize()
        return float(self._start.elapsed_time(reading)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
