"""Times of the actions of a row; on CUDA measured by events, because launches are asynchronous."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from meshwright.mesh.activity import Activity
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
        """Return the seconds from the start of the row to the event;
        block until the device has reached it.
        """
        reading.synchronize()
        return float(self._start.elapsed_time(reading)) / 1e3


Clock: TypeAlias = CpuClock | CudaClock
"""Clock whose readings are resolved to seconds later:
on CUDA the device may not have reached them yet.
"""


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
    activity: Activity
    """The rank's present activity, set by each action as it begins."""
    readings: list[tuple[Action, Any, Any]] = field(default_factory=list)
    """Start and end of each action; for a RECV, of the wait for its value."""
    readings_of_data: list[tuple[Any, Any]] = field(default_factory=list)
    """Start and end of each read of samples."""
    waited_s: float = 0.0
    """Seconds that the host program waited for other ranks,
    from the start of the row to its STEP.
    """
    waited_in_reduce_s: float = 0.0
    """Part of ``waited_s`` in REDUCE."""
    waited_in_step_s: float = 0.0
    """Seconds that the host program waited in STEP, where no work remains to overlap with."""

    @property
    def is_on_device(self) -> bool:
        """True on CUDA, where reading a time may have to wait for the device."""
        return isinstance(self.clock, CudaClock)

    def separate(self, first: int) -> None:
        """Divide the time of a pair at the earlier of its two ends.
        Its readings are among those from ``first`` on.
        """
        # in the order in which the two ended; F began first
        ended_first, ended_last = (
            index
            for index in range(first, len(self.readings))
            if self.readings[index][0].kind in COMPUTE
        )
        start = next(start for action, start, _ in self.readings[first:] if action.kind is Kind.F)
        first_action, _, middle = self.readings[ended_first]
        last_action, _, end = self.readings[ended_last]
        self.readings[ended_first] = (first_action, start, middle)
        self.readings[ended_last] = (last_action, middle, end)

    @property
    def start_s(self) -> float:
        """Start of the row on this machine's monotonic clock, in seconds."""
        return self.clock.start_s

    @property
    def spans(self) -> tuple[Span, ...]:
        """Actions so far, with start and end in seconds from the start of the row."""
        at = self.clock.resolve
        return tuple(
            Span(self.rank, action, at(start), at(end)) for action, start, end in self.readings
        )

    @property
    def data(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each read of samples, in seconds from the start of the row."""
        at = self.clock.resolve
        return tuple((at(start), at(end)) for start, end in self.readings_of_data)

    def computing(self) -> tuple[float, float]:
        """Return (seconds of computation, seconds from the start of the row to the end
        of the last computation).
        """
        at = self.clock.resolve
        spans = [
            (at(start), at(end)) for action, start, end in self.readings if action.kind in COMPUTE
        ]
        computing_s = sum(end - start for start, end in spans)
        last_end_s = max(end for _, end in spans)
        return computing_s, last_end_s

    def own_s(self) -> float:
        """Return the seconds before STEP in which this rank did not wait for other ranks:
        its own work.

        On CUDA the host program rarely waits. There it is the time in which the device computed and
        samples were read, and it includes waits of collectives for other ranks of the
        tensor-parallel group.
        """
        if self.is_on_device:
            computing_s, _ = self.computing()
            return computing_s + sum(end - start for start, end in self.data)
        step = next(start for action, start, _ in self.readings if action.kind is Kind.STEP)
        return self.clock.resolve(step) - self.waited_s

    def reducing_s(self) -> float:
        """Return the seconds by which exposed gradient reductions delayed this rank and its STEP.

        Waits in STEP are slack and are subtracted: the rank would have waited there without the
        reduction. On CUDA they cannot be measured, and all of REDUCE counts.
        """
        if self.is_on_device:
            at = self.clock.resolve
            return sum(
                at(end) - at(start)
                for action, start, end in self.readings
                if action.kind is Kind.REDUCE
            )
        return max(self.waited_in_reduce_s - self.waited_in_step_s, 0.0)


class TimedReading:
    """Times of a block that reads samples."""

    def __init__(self, times: RowTimes) -> None:
        self._times = times

    def __enter__(self) -> None:
        times = self._times
        self._start = times.clock.read()
        times.activity.begin(times.activity.READING_SAMPLES)

    def __exit__(self, error_type: type[BaseException] | None, *details: object) -> None:
        if error_type is None:
            times = self._times
            times.readings_of_data.append((self._start, times.clock.read()))


class TimedAction:
    """Context in which the rank runs an action: its present activity,
    and one of ``times.readings`` when it ends without an error.

    A class, because a generator would cost more Python calls for each action.
    """

    __slots__ = ("_action", "_start", "_times")

    def __init__(self, times: RowTimes, action: Action) -> None:
        self._times, self._action = times, action

    def __enter__(self) -> None:
        self._times.activity.begin(self._action)
        self._start = self._times.clock.read()

    def __exit__(self, error_type: type[BaseException] | None, *details: object) -> None:
        if error_type is None:
            times = self._times
            times.readings.append((self._action, self._start, times.clock.read()))
