"""Outlines: cache keys of layers and values on meta.
Equal layer and input outlines give equal output outlines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from meshwright.seeding import SeededDropout

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
OF_THE_DRAW = {"name", "current", "seed", "num_calls"}
"""Attributes of a SeededDropout that decide which elements it drops, but affect no shape."""


class ModuleOutline(NamedTuple):
    """Class and plain attributes of a layer or one of its submodules."""

    name: str
    kind: type[nn.Module]
    forward: Callable[..., Any]
    attributes: tuple[tuple[str, str], ...]
    """Names and ``repr`` of the attributes that are not torch's own."""


class Outline(NamedTuple):
    """Outline of a layer: its tensors and its modules."""

    tensors: tuple[tuple[Any, ...], ...]
    """(name, shape, dtype, device, requires_grad) of each weight and buffer."""
    modules: tuple[ModuleOutline, ...]

    @property
    def is_passing(self) -> bool:
        """True if an attribute's ``repr`` contains an address, which another object may reuse:
        not to be cached.
        """
        return any(" at 0x" in text for module in self.modules for _, text in module.attributes)


def outline_of(layer: nn.Module) -> Outline:
    """Return the outline of a layer: classes with their forwards, plain attributes,
    shapes of weights and buffers.
    """
    tensors = [
        *layer.named_parameters(remove_duplicate=False),
        *layer.named_buffers(remove_duplicate=False),
    ]
    return Outline(
        tuple(
            (name, tuple(t.shape), t.dtype, t.device.type, t.requires_grad) for name, t in tensors
        ),
        tuple(
            ModuleOutline(name, type(module), type(module).forward, _attributes(module))
            for name, module in layer.named_modules(remove_duplicate=False)
        ),
    )


def _attributes(module: nn.Module) -> tuple[tuple[str, str], ...]:
    left_out = (
        OF_EVERY_MODULE | OF_THE_DRAW if isinstance(module, SeededDropout) else OF_EVERY_MODULE
    )
    return tuple(
        (name, repr(value)) for name, value in sorted(vars(module).items()) if name not in left_out
    )


def outline_of_value(value: Any) -> Any:
    """Return the outline of a value: its tree, and shape, strides,
    dtype and gradient flag of each tensor.
    """
    leaves, tree = tree_flatten(value)
    return str(tree), tuple(
        (tuple(t.shape), t.stride(), t.dtype, t.requires_grad) if isinstance(t, Tensor) else repr(t)
        for t in leaves
    )
