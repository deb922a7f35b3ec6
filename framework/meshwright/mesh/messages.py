"""Serialization of small values sent between ranks. JSON, never pickle,
so that no received message can run code.

null, true, 3, 0.5, "text"     as they are; NaN and infinities too; floats keep every bit
[1, 2]                         a list
{"": "tuple", "of": [...]}     tuple, set, dict (pairs), path
{"": "Link", "of": [...]}      a NamedTuple or Enum that the receiver lists
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from meshwright.errors import CommunicationError

MAX_BYTES = 2**28
"""Maximum bytes of one rank's value."""
TAG, FIELDS = "", "of"


def encode(value: Any, kinds: Sequence[type] = ()) -> bytes:
    """Return a value as JSON bytes. ``kinds``: the NamedTuples and Enums in it."""
    return json.dumps(
        _packed(value, {kind.__name__: kind for kind in kinds}), separators=(",", ":")
    ).encode()


def decode(message: bytes, kinds: Sequence[type] = ()) -> Any:
    """Return the value of :func:`encode`, made of plain Python objects and ``kinds`` alone.

    Raises:
        CommunicationError: the message was not made by :func:`encode`.
    """
    try:
        return _unpacked(json.loads(message), {kind.__name__: kind for kind in kinds})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CommunicationError(
            "MW-MESH-012",
            f"a message of {len(message)} bytes from another rank cannot be read"
            f" ({type(error).__name__}: {error}): do all ranks run the same version of meshwright,"
            " and nothing else sends to their ports?",
        ) from None


def _packed(value: Any, kinds: dict[str, type]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_packed(part, kinds) for part in value]
    if kinds.get(kind.__name__) is kind:
        parts = [value.value] if isinstance(value, Enum) else value
        return {TAG: kind.__name__, FIELDS: [_packed(part, kinds) for part in parts]}
    if kind in (tuple, set, dict):
        parts = value.items() if kind is dict else value
        return {TAG: kind.__name__, FIELDS: [_packed(part, kinds) for part in parts]}
    if isinstance(value, Path):
        return {TAG: "path", FIELDS: [str(value)]}
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} is not sent between ranks: name it among the"
        " kinds"
    )


def _unpacked(value: Any, kinds: dict[str, type]) -> Any:
    if isinstance(value, list):
        return [_unpacked(part, kinds) for part in value]
    if not isinstance(value, dict):
        return value
    name, fields = value[TAG], _unpacked(value[FIELDS], kinds)
    if not isinstance(fields, list) or len(value) != 2:
        raise ValueError("fields are no list")
    if name in kinds:
        return kinds[name](*fields)
    plain = {"tuple": tuple, "set": set, "dict": dict}
    if name in plain:
        return plain[name](fields)
    if name == "path":
        return Path(*fields)
    raise ValueError(f"{name!r} is not expected here")
