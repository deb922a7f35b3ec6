"""Times of the actions of a row; on CUDA measured by events, because launches are asynchronous."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from meshwright.schedule.action import COMPUTE, Action, Kind
from meshwright.schedule.analysis import Span


class CpuClock:
    """Clock of the host program."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        """Start of the row in seconds, on one clock for all processes of a machine."""

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


Clock: TypeAlias = CpuClock | CudaClock
"""Clock whose readings are resolved to seconds later: on CUDA the device may not have reached them yet."""


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()


@dataclass
class RowTimes:
    """Times of one run of a row, as readings of a clock.

    All properties and methods that return seconds block until the device has reached the readings.
    """

    rank: int
    """Pipeline rank that ran the row."""
    clock: Clock
    readings: list[tuple[Action, Any, Any]] = field(default_factory=list)
    """Start and end of each action; for a RECV, of the wait for its value."""
    readings_of_data: list[tuple[Any, Any]] = field(default_factory=list)
    """Start and end of each read of samples."""
    waited_s: float = 0.0
    """Seconds that the host program waited for other ranks, from the start of the row to its STEP."""
    waited_in_reduce_s: float = 0.0
    """Part of ``waited_s`` in REDUCE."""
    waited_in_step_s: float = 0.0
    """Seconds that the host program waited in STEP, where no work remains to overlap with."""

    @property
    def is_on_device(self) -> bool:
        """True on CUDA, where reading a time may have to wait for the device."""
        return isinstance(self.clock, CudaClock)

    def end(self, action: Action, start: Any) -> None:
        """Record an action that began at the reading ``start`` and ends now."""
        self.readings.append((action, start, self.clock.read()))

    def separate(self, first: int) -> None:
        """Divide the time of a pair at the earlier of its two ends. Its readings are among those from ``first`` on."""
        one, other = (at for at in range(first, len(self.readings)) if self.readings[at][0].kind in COMPUTE)
        start = next(start for action, start, _ in self.readings[first:] if action.kind is Kind.F)
        (action, _, middle), (later, _, end) = self.readings[one], self.readings[other]
        self.readings[one], self.readings[other] = (action, start, middle), (later, middle, end)

    @property
    def start_s(self) -> float:
        """Start of the row on this machine's monotonic clock, in seconds."""
        return self.clock.start_s

    @property
    def spans(self) -> tuple[Span, ...]:
        """Actions so far, with start and end in seconds from the start of the row."""
        at = self.clock.resolve
        return tuple(Span(self.rank, action, at(start), at(end)) for action, start, end in self.readings)

    @property
    def data(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each read of samples, in seconds from the start of the row."""
        at = self.clock.resolve
        return tuple((at(start), at(end)) for start, end in self.readings_of_data)

    def computing(self) -> tuple[float, float]:
        """Return (seconds of computation, seconds from the start of the row to the end of the last computation)."""
        at = self.clock.resolve
        times = [(at(start), at(end)) for action, start, end in self.readings if action.kind in COMPUTE]
        return sum(end - start for start, end in times), max(end for _, end in times)

    def own_s(self) -> float:
        """Return the seconds before STEP in which this rank did not wait for other ranks: its own work.

        On CUDA the host program rarely waits. There it is the time in which the device computed and samples were read,
        and it includes waits of collectives for other ranks of the tensor-parallel group.
        """
        at = self.clock.resolve
        if self.is_on_device:
            return self.computing()[0] + sum(end - start for start, end in self.data)
        return at(next(start for action, start, _ in self.readings if action.kind is Kind.STEP)) - self.waited_s

    def reducing_s(self) -> float:
        """Return the seconds by which exposed gradient reductions delayed this rank and its STEP.

        Waits in STEP are slack and are subtracted: the rank would have waited there without the reduction. On CUDA they
        cannot be measured, and all of REDUCE counts.
        """
        if self.is_on_device:
            at = self.clock.resolve
            return sum(at(end) - at(start) for action, start, end in self.readings if action.kind is Kind.REDUCE)
        return max(self.waited_in_reduce_s - self.waited_in_step_s, 0.0)
