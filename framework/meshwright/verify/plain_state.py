"""Step state (``step_sums``, running buffers) and recorded metrics of the plain run,
by the modules' own methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.metrics import Recorder


def widened(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return CPU copies of running buffers; integer counts become float64,
    so that they compare like the others.
    """
    copies = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
    return {
        name: copy if copy.is_floating_point() else copy.double() for name, copy in copies.items()
    }


def begin_state(layers: nn.Module, running: Iterable[str], scale: float) -> dict[str, Tensor]:
    """Set ``gradient_scale`` on the modules that have it,
    and return copies of the running buffers by name.
    """
    for module in layers.modules():
        if hasattr(module, "gradient_scale"):
            module.gradient_scale = scale  # type: ignore[assignment]
    return {name: layers.get_buffer(name).clone() for name in running}


def end_state(layers: nn.Module, before: Mapping[str, Tensor]) -> dict[str, float]:
    """End a step: call ``end_step`` of each module with ``step_sums``.
    Return :func:`digests` of the sums.

    ``before``: buffers to restore after a skipped step, which has no ``end_step``; {} after any
        other.
    """
    ending: dict[str, Any] = {
        name: module for name, module in layers.named_modules() if has_sums(module)
    }
    sums = {
        f"{name}.{each}": module.get_buffer(each)
        for name, module in ending.items()
        for each in module.step_sums
    }
    found = digests(sums)
    for name, buffer in before.items():
        layers.get_buffer(name).copy_(buffer)
    for module in ending.values() if not before else ():
        module.end_step()
    return found


def has_sums(module: nn.Module) -> bool:
    """Return whether a module declares step sums."""
    return bool(getattr(module, "step_sums", ()))


def digests(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return a checksum of each sum, which verify compares as a metric of the step:
    element i has weight i + 1.
    """
    flat = {name: total.detach().double().cpu().reshape(-1) for name, total in sums.items()}
    return {
        f"of sums {name}": float((each * torch.arange(1, each.numel() + 1)).sum())
        for name, each in flat.items()
    }


def metrics_of(recorder: Recorder) -> dict[str, float]:
    """Return the mean of each recorded metric: its sum over its count."""
    pairs = {name: sums.tolist() for name, sums in recorder.sums.items()}
    return {name: value / count for name, (value, count) in pairs.items() if count}
