"""States of the random generators that a layer may draw from, besides torch's default one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def generator_states(layer: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the states of Python's and numpy's generators,
    and of the generators that the layer's modules hold.
    """
    numpy = sys.modules.get("numpy")
    states: dict[str, tuple[Any, ...]] = {"Python's random": random.getstate()}
    if numpy is not None:
        states["numpy.random"] = _of_numpy(numpy.random.get_state())
    for module_name, module in layer.named_modules():
        for attribute, value in vars(module).items():
            for state in map(_state_of, _items(value)):
                if state is not None:
                    name = f"its own generator {f'{module_name}.{attribute}'.lstrip('.')}"
                    states[name] = (*states.get(name, ()), state)
    return states


def _of_numpy(state: Any) -> tuple[Any, ...]:
    """Return numpy's legacy state in a form that ``==`` compares."""
    name, keys, *rest = state
    return (name, keys.tobytes(), *rest)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _state_of(value: Any) -> Any:
    """Return the state of a random generator; None for any other object."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return _of_numpy(value.get_state())
    return None
