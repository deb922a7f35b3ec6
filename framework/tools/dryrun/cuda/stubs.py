"""Stubs of ``torch.cuda`` over the device that does nothing, which note each wait of the host program.

    Event.synchronize, elapsed_time, Stream.synchronize, torch.cuda.synchronize      the host waits for the device
    tensor.item(), tolist(), a copy between host and device that is not non_blocking  likewise, in recorder.py

Only for a process that does nothing else; nothing is restored.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

PACKAGE = Path(__file__).parents[3]
HIDDEN = (
    str(Path(torch.__file__).parent),
    str(PACKAGE / "tools" / "dryrun"),
    str(PACKAGE / "model" / "recorder.py"),
    "<",
)
"""Beginnings of the names of files whose lines are not the place of a wait."""


def place() -> str:
    """Return file:line of the innermost code that is neither torch's nor a recorder's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(HIDDEN):
        frame = frame.f_back
    if frame is None:
        return "autograd"
    file = Path(frame.f_code.co_filename)
    return f"{file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file.name}:{frame.f_lineno}"


class HostWaits:
    """Stubs that note the place of each wait, and the moment by a counter."""

    def __init__(self) -> None:
        self.now: Callable[[], int] = lambda: 0
        self.noted: list[tuple[int, str]] = []
        """(moment, place) of each wait."""

    def note(self, *args: object) -> float:
        """Note a wait at the caller's place; return a duration in ms."""
        self.noted.append((self.now(), place()))
        return 1.0

    def install(self) -> None:
        """Replace what a CPU build of ``torch.cuda`` lacks, for the rest of this process."""
        note = self.note

        class Event:
            def __init__(self, **options: object) -> None: ...

            def record(self, stream: object = None) -> None: ...

            def wait(self, stream: object = None) -> None: ...

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                note()

            def elapsed_time(self, other: object) -> float:
                return note()

        class Stream:
            def __init__(self, device: object = None, priority: int = 0) -> None:
                self.device, self.cuda_stream = torch.device("cuda", 0), id(self)

            def wait_stream(self, stream: object) -> None: ...

            def wait_event(self, event: object) -> None: ...

            def record_event(self, event: Event | None = None) -> Event:
                return event or Event()

            def synchronize(self) -> None:
                note()

        current = Stream()
        replaced: dict[str, Any] = {
            "Event": Event,
            "Stream": Stream,
            "current_stream": lambda device=None: current,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_device": lambda: 0,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "set_device": lambda device: None,
            "synchronize": note,
            "max_memory_allocated": lambda device=None: 0,
        }
        for name, value in replaced.items():
            setattr(torch.cuda, name, value)
        _patch_fake_tensors(note)


def _patch_fake_tensors(note: Callable[[], float]) -> None:
    """Give fake tensors what a step asks of tensors on CUDA."""
    tensor: Any = torch.Tensor
    fake: Any = FakeTensor
    data = tensor.data

    def set_data(self: Any, value: Any) -> None:
        data.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device  # an artefact of FakeTensor: it keeps the device of before

    def tolist(self: Any) -> list[float]:
        note()
        return [1.0] * self.numel()

    fake.data = property(data.__get__, set_data)
    fake.tolist = tolist
    tensor.pin_memory = lambda self, *args: self
