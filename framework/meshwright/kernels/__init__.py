"""Triton kernels for CUDA, each of which replaces many kernels of plain torch code.

    dropout.py        operator meshwright::dropout          triton_dropout.py        its kernel
    adamw_8bit.py     operator meshwright::adamw_8bit       triton_adamw_8bit.py     its kernel
    float8.py         launches for fp8/quantise.py          triton_float8.py         their kernels

Custom operators wrap the launches, so that fake tensors run none. Triton is imported at the first
launch, never before. Each caller has plain torch code for other devices, and for machines without
Triton or a C compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.system.host import missing_tools

PRIVATE_TORCH = {
    "torch._subclasses.fake_tensor.FakeTensor": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

DEVICES = {"cuda"}
"""Device types that the kernels run on."""
_of_cpu = "cpu"


def can_launch(tensor: Tensor) -> bool:
    """Return whether kernels run on this tensor's device. Fake tensors, which launch nothing,
    need no Triton.
    """
    return device_kind(tensor) in DEVICES and (isinstance(tensor, FakeTensor) or has_tools())


@cache
def has_tools() -> bool:
    """Return whether this machine has Triton and a C compiler; looked up once per process."""
    return not missing_tools()


def device_kind(tensor: Tensor) -> str:
    """Return ``tensor.device.type``, or for CPU tensors the type set by :func:`treat_cpu_as`."""
    kind = tensor.device.type
    return _of_cpu if kind == "cpu" else kind


@contextmanager
def treat_cpu_as(kind: str) -> Iterator[None]:
    """Make CPU tensors take the code paths of device type ``kind`` inside the context,
    for dry runs.
    """
    global _of_cpu
    before, _of_cpu = _of_cpu, kind
    try:
        yield
    finally:
        _of_cpu = before
