"""Step state in the plain run: as the user's training loop would have it, from the modules' own methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def begin_state(layers: nn.Module, running: Iterable[str], scale: float) -> dict[str, Tensor]:
    """Set the gradient scale of a step's losses, and return copies of the running buffers by name."""
    for module in layers.modules():
        if hasattr(module, "gradient_scale"):
            module.gradient_scale = scale  # type: ignore[assignment]
    return {name: layers.get_buffer(name).clone() for name in running}


def end_state(layers: nn.Module, before: Mapping[str, Tensor]) -> None:
    """End a step: call ``end_step`` of each module with ``step_sums``; of a skipped step, restore ``before``."""
    for name, buffer in before.items():
        layers.get_buffer(name).copy_(buffer)
    ending: list[Any] = [module for module in layers.modules() if getattr(module, "step_sums", ())]
    for module in ending if not before else ():
        module.end_step()
