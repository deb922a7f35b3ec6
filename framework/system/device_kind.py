"""Type of the device that a tensor's computation is for, by which code chooses kernels and sizes of pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_of_cpu = "cpu"


def device_kind(tensor: Tensor) -> str:
    """Return ``tensor.device.type``; for a CPU tensor of a dry run that of the run's device."""
    kind = tensor.device.type
    return _of_cpu if kind == "cpu" else kind


@contextmanager
def taking_cpu_as(kind: str) -> Iterator[None]:
    """Make CPU tensors stand for those of another device inside the context: their code, without its kernels."""
    global _of_cpu
    before, _of_cpu = _of_cpu, kind
    try:
        yield
    finally:
        _of_cpu = before
