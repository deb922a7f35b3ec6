"""Outline of a user's model: its builder run with parameters on the meta device,
which takes no memory for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from meshwright.model import requirements
from meshwright.model.unwritten import MARKED, Pattern
from meshwright.model.write_record import WriteRecord


class ModelOutline(NamedTuple):
    """Model with parameters on meta and real buffers."""

    layers: Any
    """Result of the builder; an nn.Sequential, if it fits."""
    record: WriteRecord | None = None
    """Writes of the builder. None: it ran on the CPU,
    and its parameters moved to meta afterwards.
    """


def draw_outline(
    build: Callable[[], Any], pattern: Pattern = MARKED, sizes: Collection[int] = ()
) -> ModelOutline:
    """Run a builder with parameters on meta, and record its writes to them.

    ``pattern``: bits for uninitialised memory on the CPU. ``sizes``: bytes of large storages that
        get them too.
    """
    with WriteRecord(pattern, sizes) as record, parameters_on_meta(record):
        return ModelOutline(build(), record)


def to_meta(layers: nn.Module) -> None:
    """Move the parameters of a model to meta, in place; shared ones stay shared."""
    moved: dict[int, nn.Parameter] = {}
    for module in layers.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, UninitializedParameter):
                if id(parameter) not in moved:
                    moved[id(parameter)] = _on_meta(parameter, None)
                module._parameters[name] = moved[id(parameter)]


def _on_meta(parameter: nn.Parameter, record: WriteRecord | None) -> nn.Parameter:
    """Return an empty copy of a parameter on meta.
    Attributes record hooks and class of the original.
    """
    outline = torch.empty_like(parameter, device="meta").as_subclass(Tensor).detach()
    found = nn.Parameter(outline, requires_grad=parameter.requires_grad)
    if requirements.has_hooks(parameter):
        setattr(found, requirements.HAS_HOOKS, True)
    if type(parameter) is not nn.Parameter:
        setattr(found, requirements.CLASS, type(parameter).__name__)
    if record is not None:
        record.register(parameter, found)
    return found


@contextmanager
def parameters_on_meta(record: WriteRecord | None = None) -> Iterator[None]:
    """Move each nn.Parameter to the meta device as it is registered, inside this context;
    buffers stay real.

    ``record``: the record of the builder's writes, which finds parameters that had values when they
        were registered.
    """
    register = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_lazy = isinstance(parameter, UninitializedParameter)
        if parameter is not None and not parameter.is_meta and not is_lazy:
            original, outline = moved.get(id(parameter), (None, parameter))
            # else it is shared: registered a second time
            if original is None or original() is not parameter:
                outline = _on_meta(parameter, record)
                moved[id(parameter)] = weakref.ref(parameter), outline
            parameter = outline
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
