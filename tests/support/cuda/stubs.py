"""Stubs of ``torch.cuda`` for the stub CUDA device: synchronisations of the host,
streams and events.

    Event.synchronize, elapsed_time, Stream.synchronize, torch.cuda.synchronize      the host waits for the device
    tensor.item(), tolist(), a copy between host and device that is not non_blocking  likewise, in
    recorder.py

Nothing is restored: install them only in a process for this check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # private: in torch 2.11 to 2.15

from tests.support.cuda.call_site import call_site
from tests.support.cuda.streams import DEFAULT, Streams


class HostWaits:
    """Synchronisations of the host with the device, each with its place in the code."""

    def __init__(self) -> None:
        self.now: Callable[[], int] = lambda: 0
        self.noted: list[tuple[int, str]] = []
        """(operation number, place) of each wait."""

    def note(self) -> None:
        """Note a wait at the caller's place."""
        self.noted.append((self.now(), call_site()))


def install(waits: HostWaits, streams: Streams) -> None:
    """Replace what a CPU build of ``torch.cuda`` lacks, for the rest of this process."""
    for name, value in _replacements(waits, streams).items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = torch.cuda.current_stream
    streams.install()
    _patch_fake_tensors(waits, streams)


def _replacements(waits: HostWaits, streams: Streams) -> dict[str, Any]:
    """Return the stubs by their names in ``torch.cuda``."""
    made: dict[int, Any] = {}
    """Number of a stream -> the stream."""

    def current(device: object = None) -> Any:
        return made[streams.current]

    def on(stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if stream is None else streams.on(stream.number)

    def synchronize(device: object = None) -> None:
        waits.note()
        streams.order.sync_all_streams()

    event, stream = _event_and_stream(waits, streams, made)
    default = stream(number=DEFAULT)
    return {
        "Event": event,
        "Stream": stream,
        "current_stream": current,
        "default_stream": lambda device=None: default,
        "stream": on,
        "current_device": lambda: 0,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": synchronize,
        "max_memory_allocated": lambda device=None: 0,
    }


def _event_and_stream(waits: HostWaits, streams: Streams, made: dict[int, Any]) -> tuple[Any, Any]:
    """Return the classes of events and streams; a new stream is added to ``made``."""

    class Event:
        def __init__(self, **options: object) -> None:
            self.number = streams.new_event()

        def record(self, stream: FakeStream | None = None) -> None:
            streams.order.record_state(
                self.number, streams.current if stream is None else stream.number
            )

        def wait(self, stream: FakeStream | None = None) -> None:
            made[streams.current if stream is None else stream.number].wait_event(self)

        def query(self) -> bool:
            streams.order.all_streams_wait_for_event(self.number)
            return True

        def synchronize(self) -> None:
            if not streams.is_known_to_host(self.number):
                waits.note()
            streams.order.all_streams_wait_for_event(self.number)

        def elapsed_time(self, other: Event) -> float:
            other.synchronize()
            return 1.0

    class FakeStream:
        def __init__(
            self, device: object = None, priority: int = 0, number: int | None = None
        ) -> None:
            self.device = torch.device("cuda", 0)
            self.number = (
                streams.new_stream(f"the stream made at {call_site()}")
                if number is None
                else number
            )
            self.cuda_stream = self.number
            made[self.number] = self

        def wait_stream(self, stream: FakeStream) -> None:
            streams.wait(self.number, stream.number)

        def wait_event(self, event: Event) -> None:
            streams.order.stream_wait_for_event(self.number, event.number)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            waits.note()
            streams.host_waits(self.number)

    return Event, FakeStream


def _patch_fake_tensors(waits: HostWaits, streams: Streams) -> None:
    """Replace ``data``, ``tolist`` and ``pin_memory``,
    which a step needs of fake tensors on CUDA.
    """
    tensor: Any = torch.Tensor
    fake: Any = FakeTensor
    data = tensor.data

    def set_data(self: Any, value: Any) -> None:
        data.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device  # FakeTensor itself keeps the previous device

    def tolist(self: Any) -> list[float]:
        waits.note()
        streams.read_by_host(self)
        return [1.0] * self.numel()

    fake.data = property(data.__get__, set_data)
    fake.tolist = tolist
    tensor.pin_memory = lambda self, *args: self
