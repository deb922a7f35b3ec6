"""Triton kernels for CUDA, each in place of many kernels of plain torch code.

    dropout.py        operator meshwright::dropout          triton_dropout.py        its kernel
    adamw_8bit.py     operator meshwright::adamw_8bit       triton_adamw_8bit.py     its kernel
    float8.py         launches of fp8/quantise.py           triton_float8.py         their kernels

The operators hide the launch: fake tensors pass without one. Triton is imported at the first launch, never before. The
plain torch code beside each caller runs on every other device, and on a machine that cannot make kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.system.host import missing_tools

DEVICES = {"cuda"}
"""Types of the devices that kernels run on."""
_of_cpu = "cpu"


def can_launch(tensor: Tensor) -> bool:
    """Return whether kernels run where this tensor lies. A dry run, which launches nothing, needs no Triton."""
    return device_kind(tensor) in DEVICES and (isinstance(tensor, FakeTensor) or has_tools())


@cache
def has_tools() -> bool:
    """Return whether this machine can make kernels; looked up once per process."""
    return not missing_tools()


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
