"""State of a user's optimizer in the form that checkpoints hold: names of tensors,
and values of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_RESERVED = ("weights", "master")
"""Names in a checkpoint that no optimizer state can have: those of the weights."""
_PLAIN: dict[str, type] = {"bool": bool, "int": int, "float": float}
_TENSORS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _TENSORS.items()}
MAX_STATES = 64
"""Bound on the number of states of an optimizer."""


class StateNumber(NamedTuple):
    """A number in the state of every parameter, such as the number of steps."""

    kind: str
    """Python's type, or the dtype of a tensor without dims."""
    value: float

    def make(self, device: torch.device) -> Any:
        """Return the number as the optimizer keeps it."""
        if self.kind in _PLAIN:
            return _PLAIN[self.kind](self.value)
        return torch.tensor(self.value, dtype=_TENSORS[self.kind], device=device)


class OwnStates(NamedTuple):
    """State of each parameter of a user's optimizer:
    the same names and numbers for all parameters.
    """

    names: tuple[str, ...] = ()
    """Tensors with one number per element, sorted."""
    numbers: Mapping[str, StateNumber] = {}

    def fill(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
        """Return the state of a parameter with these tensors, as its optimizer would have it."""
        return {**tensors, **{name: number.make(device) for name, number in self.numbers.items()}}

    def record(self) -> dict[str, Any]:
        """Return the states as JSON, for the manifest of a checkpoint."""
        return {
            "tensors": list(self.names),
            "numbers": {name: list(each) for name, each in self.numbers.items()},
        }


class UnknownStateError(Exception):
    """A state that no checkpoint can hold; the text names it, and the reason."""


def is_state_name(name: str) -> bool:
    """Return whether a checkpoint can hold a state under this name."""
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name) is not None and name not in _RESERVED


def find_states(state: Mapping[Any, Any], parameter: Tensor) -> OwnStates:
    """Return the states that exist of a parameter. Reads the values of numbers,
    so it waits for the device.

    Raises:
        UnknownStateError: one is neither a tensor like the parameter nor a number, or its name
            cannot be saved.
    """
    names, numbers = [], {}
    for name, value in state.items():
        if value is None:
            continue
        if not isinstance(name, str) or not is_state_name(name):
            raise UnknownStateError(f"keeps state[{name!r}]: a checkpoint cannot have this name")
        if isinstance(value, Tensor) and value.dim() > 0 and _is_alike(value, parameter):
            names.append(name)
        elif (number := _number(value)) is not None:
            numbers[name] = number
        else:
            raise UnknownStateError(
                f"keeps state[{name!r}], {_describe(value)}: neither a number per element nor one"
            )
    if len(names) + len(numbers) > MAX_STATES:
        raise UnknownStateError(
            f"keeps {len(names) + len(numbers)} states per parameter: at most {MAX_STATES}"
        )
    return OwnStates(tuple(sorted(names)), {name: numbers[name] for name in sorted(numbers)})


def _is_alike(state: Tensor, parameter: Tensor) -> bool:
    return state.shape == parameter.shape and state.dtype == parameter.dtype


def _number(value: Any) -> StateNumber | None:
    """Return a finite Python number, or a tensor without dims, as a :class:`StateNumber`;
    None for anything else.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if value.dim() or value.dtype not in _DTYPE_NAMES:
            return None
        kind, value = _DTYPE_NAMES[value.dtype], value.item()
    elif kind not in _PLAIN or type(value) is not _PLAIN[kind]:
        return None
    is_sound = abs(value) < 2**63 or (kind == "float" and math.isfinite(value))
    return StateNumber(kind, value) if is_sound else None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r}" if isinstance(value, int | float) else f"a {type(value).__name__}"


def read_record(record: Any) -> OwnStates:
    """Return the states that :meth:`OwnStates.record` wrote. ``record``: parsed JSON, not trusted.

    Raises:
        ValueError: it is no such record.
    """
    if not isinstance(record, dict) or set(record) != {"tensors", "numbers"}:
        raise ValueError("a table of tensors and numbers is needed")
    names, numbers = record["tensors"], record["numbers"]
    if (
        not isinstance(names, list)
        or not isinstance(numbers, dict)
        or len(names) + len(numbers) > MAX_STATES
    ):
        raise ValueError("a list of tensors, and a table of numbers, are needed")
    every = [*names, *numbers]
    if len(set(map(str, every))) != len(every) or not all(
        isinstance(n, str) and is_state_name(n) for n in every
    ):
        raise ValueError("each state needs a name of its own")
    return OwnStates(
        tuple(sorted(names)), {name: _read_number(name, numbers[name]) for name in sorted(numbers)}
    )


def _read_number(name: str, found: Any) -> StateNumber:
    pair: list[Any] = found if isinstance(found, list) and len(found) == 2 else [None, None]
    kind, value = pair
    if not isinstance(kind, str) or (kind not in _PLAIN and kind not in _TENSORS):
        raise ValueError(f"{name} has no kind of number")
    is_whole = kind in ("int", "int64", "int32")
    limit = 2**31 if kind == "int32" else 2**63
    if kind == "bool":
        is_sound = isinstance(value, bool)
    elif is_whole:
        is_sound = type(value) is int and -limit <= value < limit
    else:
        is_sound = type(value) in (int, float) and math.isfinite(value)
    if not is_sound:
        raise ValueError(f"{name} = {str(value)[:40]} is no {kind}")
    return StateNumber(kind, value)
