"""Persistent buffers of a transformers model as frozen parameters: loaded,
sent to the ranks and saved by name.

Such a buffer is a constant of the forward: the bias of a router that some trainer has balanced, a
slope, a scale of a layer. It keeps its value, as it does in transformers' own training. A forward
that writes one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError


def freeze_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Replace the persistent floating-point buffers of a model by frozen parameters on meta,
    in place.

    Returns:
        Name of each -> its value as the model is built.
    """
    found: dict[str, Tensor] = {}
    for place, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if (
                buffer is None
                or name in module._non_persistent_buffers_set
                or not buffer.is_floating_point()
            ):
                continue
            del module._buffers[name]
            outline = torch.empty_like(buffer, dtype=torch.float32, device="meta")
            module.register_parameter(name, nn.Parameter(outline, requires_grad=False))
            found[f"{place}.{name}"] = buffer.detach().float()
    return found


def versions(module: nn.Module) -> dict[str, int]:
    """Return the number of in-place writes to each frozen parameter so far."""
    return {
        name: each._version for name, each in module.named_parameters() if not each.requires_grad
    }


def check_unchanged(module: nn.Module, before: Mapping[str, int], place: str) -> None:
    """Check that a forward has written no frozen parameter; ``before``: :func:`versions` before it.

    Raises:
        ModelError: it has.
    """
    for name, version in versions(module).items():
        if version != before[name]:
            raise ModelError(
                "MW-INTEROP-116",
                f"{place}: its forward writes {name}: such a state would differ between ranks, and"
                " is not carried over",
            )
