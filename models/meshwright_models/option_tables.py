"""Tables of a builder's options, such as ``model.options.moe``: a NamedTuple has their names,
types and defaults.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

Options = TypeVar("Options", bound=NamedTuple)
TYPES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}


def read_table(name: str, given: Any, kind: type[Options]) -> Options:
    """Return the options of a table.

    Raises:
        ValueError: it is no table, a name is unknown or missing, or a value has another type.
            Contains all values of a wrong type.
    """
    names = kind._fields
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}={given!r} must be a table; its options are {', '.join(names)}")
    for option in given:
        if option not in names:
            close = difflib.get_close_matches(option, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            raise ValueError(f"{name}: there is no option {option}; {hint}")
    missing = [
        option for option in names if option not in given and option not in kind._field_defaults
    ]
    if missing:
        raise ValueError(f"{name}: {', '.join(missing)} must be given")
    hints = get_type_hints(kind)
    wrong = []
    for option, value in given.items():
        allowed = get_args(hints[option]) or (hints[option],)
        if not any(_is(value, one) for one in allowed):
            wrong.append(f"{option}={value!r} must be {TYPES[allowed[0]]}")
    if wrong:
        raise ValueError(f"{name}: {'; '.join(wrong)}")
    return kind(**given)  # type: ignore[call-overload]


def _is(value: Any, kind: type) -> bool:
    """Return whether a value has the type: True is no number, and an int is a float."""
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind
