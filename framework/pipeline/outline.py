"""What a layer and a value are on meta: layers of equal outlines do the same with values of equal outlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from meshwright.seeding import SeededDropout

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
OF_THE_DRAW = {"name", "draw", "seed", "num_calls"}
"""Of a SeededDropout: they decide which elements it drops, and no shape."""


class OfTensor(NamedTuple):
    """A weight or a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool


class OfModule(NamedTuple):
    """A part of a layer, or the layer."""

    name: str
    kind: type[nn.Module]
    forward: Callable[..., Any]
    attributes: tuple[tuple[str, str], ...]
    """Plain ones, as they are printed."""


class Outline(NamedTuple):
    """Of a layer."""

    tensors: tuple[OfTensor, ...]
    modules: tuple[OfModule, ...]

    @property
    def is_passing(self) -> bool:
        """It says where an object lies: the next one there may be another."""
        return any(" at 0x" in text for module in self.modules for _, text in module.attributes)


def outline_of(layer: nn.Module) -> Outline:
    """Classes with their forwards, plain attributes, shapes of weights and buffers."""
    tensors = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]
    return Outline(
        tuple(OfTensor(name, tuple(t.shape), t.dtype, t.device.type, t.requires_grad) for name, t in tensors),
        tuple(
            OfModule(name, type(module), type(module).forward, _attributes(module))
            for name, module in layer.named_modules(remove_duplicate=False)
        ),
    )


def _attributes(module: nn.Module) -> tuple[tuple[str, str], ...]:
    left_out = OF_EVERY_MODULE | OF_THE_DRAW if isinstance(module, SeededDropout) else OF_EVERY_MODULE
    return tuple((name, repr(value)) for name, value in sorted(vars(module).items()) if name not in left_out)


def outline_of_value(value: Any) -> Any:
    """Its tree and its tensors."""
    leaves, tree = tree_flatten(value)
    return str(tree), tuple(
        (tuple(t.shape), t.stride(), t.dtype, t.requires_grad) if isinstance(t, Tensor) else repr(t) for t in leaves
    )
