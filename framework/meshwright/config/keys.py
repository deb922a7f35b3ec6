"""Keys of the schema for error messages: existing keys, allowed values, likely intended keys.

All derived from :mod:`meshwright.config.schema`, so that there is no second list of keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic.fields import FieldInfo

from meshwright.config.aliases import FAMILIAR_VALUES, fold, own_name_of
from meshwright.config.schema import RunConfig
from meshwright.config.sections import Section
from meshwright.errors import ConfigError

Path = tuple[str, ...]
"""A key, split at its dots."""
OPEN_VALUE = "SET-ME"
"""Placeholder in configuration files for values that the user must set; loading refuses it."""


def find_open(value: Any, path: Path) -> list[Path]:
    """Return the paths of placeholders (OPEN_VALUE) in a value, also inside tables and lists."""
    if isinstance(value, dict):
        return [
            found for name, inner in value.items() for found in find_open(inner, (*path, str(name)))
        ]
    is_open = value == OPEN_VALUE or (
        isinstance(value, list) and any(find_open(inner, path) for inner in value)
    )
    return [path] if is_open else []


def flatten(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested tables: ``{"a": {"b": 1}}`` -> ("a.b", 1).
    An empty table counts as a value.
    """
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def split(dotted: str) -> Path:
    """Split a dotted key: ``"parallel.tp"`` -> ``("parallel", "tp")``."""
    return tuple(dotted.split("."))


def _sections() -> dict[str, type[Section]]:
    found: dict[str, type[Section]] = {}
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Section), name
        found[name] = field.annotation
    return found


SECTIONS = MappingProxyType(_sections())
"""Section name -> its model."""


def _keys() -> dict[Path, FieldInfo]:
    return {
        (name, key): field
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
    }


KEYS = MappingProxyType(_keys())
"""(section, key) -> pydantic's field. The whole tree, which is two levels deep."""


def _kinds(annotation: Any) -> list[Any]:
    """Return the alternatives of a union without their ``Annotated``:
    ``PositiveInt | None`` -> ``[int, NoneType]``.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]


def accepts_type(key: Path, kind: type) -> bool:
    """Return True when a key accepts values of a plain type, such as ``bool``, ``str``,
    ``dict`` or ``NoneType``.
    """
    kinds = _kinds(KEYS[key].annotation)
    return any((get_origin(k) or k) is kind for k in kinds)


def choices(key: Path) -> list[str]:
    """Return the literal words that a key accepts; empty when it accepts none."""
    kinds = _kinds(KEYS[key].annotation)
    words = [
        word
        for k in kinds
        if get_origin(k) is Literal
        for word in get_args(k)
        if isinstance(word, str)
    ]
    return [*words, "true", "false"] if bool in kinds else words


def _bounds(metadata: Sequence[Any], *, whole: bool) -> str:
    parts: list[str] = []
    for constraint in metadata:
        if isinstance(constraint, Gt):
            # For whole numbers "greater than 0" is "at least 1", which reads better.
            parts.append(
                "at least 1" if whole and constraint.gt == 0 else f"greater than {constraint.gt}"
            )
        elif isinstance(constraint, Ge):
            parts.append(f"at least {constraint.ge}")
        elif isinstance(constraint, Lt):
            parts.append(f"less than {constraint.lt}")
        elif isinstance(constraint, Le):
            parts.append(f"at most {constraint.le}")
        elif isinstance(constraint, MultipleOf):
            parts.append(f"a multiple of {constraint.multiple_of}")
        elif isinstance(constraint, FieldInfo):  # Field(...) inside Annotated
            parts.extend(
                filter(None, [_bounds(constraint.metadata, whole=whole).removeprefix(", ")])
            )
    return ", " + " and ".join(parts) if parts else ""


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(parts[0], parts[1:])
    if origin in (Union, UnionType):
        return "; or ".join(_describe(part, ()) for part in parts if part is not NoneType)
    if origin is Literal:
        words = [format_value(word) for word in parts]
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
    if origin is list:
        return f"a list, each {_describe(parts[0], ())}"
    if origin is tuple:
        length = "" if parts[-1] is Ellipsis else f" of {len(parts)}"
        return f"a list{length}, each {_describe(parts[0], ())}"
    plain = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    if annotation in plain:
        return plain[annotation] + _bounds(metadata, whole=annotation is int)
    assert origin is dict, annotation
    return "a table"


def describe_allowed(key: Path) -> str:
    """Describe the allowed values of a key: ``("parallel", "pp")`` -> "a whole number,
    at least 1".
    """
    field = KEYS[key]
    return field.description or _describe(field.annotation, field.metadata)


def toml_value(value: Any) -> str:
    """Format a value as in a TOML file; an unset one as ``none``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings are JSON's, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        given = {name: part for name, part in value.items() if part is not None}
        return (
            "{"
            + ", ".join(f"{toml_name(name)} = {toml_value(part)}" for name, part in given.items())
            + "}"
        )
    return "none" if value is None else str(value)


def toml_name(name: str) -> str:
    """Format one word of a key as in a TOML file, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def format_value(value: Any) -> str:
    """Format a value for a message, as in a TOML file but cut to 80 characters."""
    text = toml_value(value)
    return text if len(text) <= 80 else text[:77] + "..."


def null_problem(path: Path, value: Any, place: str) -> ConfigError | None:
    """Return the error for a null inside a list, which TOML cannot write, or None. ``path``:
    key of the value.
    """
    if isinstance(value, dict):
        inner = (null_problem((*path, str(name)), part, place) for name, part in value.items())
        return next(filter(None, inner), None)
    if not isinstance(value, list | tuple):
        return None
    if any(part is None for part in value):
        return ConfigError(
            "MW-CONFIG-056",
            f"{place}: {'.'.join(path)} has a null inside a list, and TOML has no null: leave the"
            " element out, or use a value that the builder takes for it",
        )
    return next(filter(None, (null_problem(path, part, place) for part in value)), None)


def nearest_value(key: Path, value: Any) -> str | None:
    """Return the allowed word closest to a value, or None."""
    words = choices(key)
    text = str(value).lower()
    familiar = FAMILIAR_VALUES.get(fold(text))
    if familiar in words:
        return familiar
    close = get_close_matches(text, words, n=1, cutoff=0.6)
    return close[0] if close else None


def nearest_section(name: str) -> str | None:
    """Return the section closest to a name, or None."""
    close = get_close_matches(fold(name), list(SECTIONS), n=1, cutoff=0.75)
    return close[0] if close else None


def _similar(one: str, other: str) -> float:
    return SequenceMatcher(None, fold(one), fold(other)).ratio()


def nearest_keys(path: Path) -> list[str]:
    """Return the dotted keys closest to an unknown one, best first; usually one or none.

    In this order: the same key with other case or dashes; the same last word in another section; a
    similar word in the same section; a similar word anywhere.
    """
    dotted = {".".join(key): key for key in KEYS}
    exact = [name for name in dotted if fold(name) == fold(".".join(path))]
    moved = [name for name, key in dotted.items() if fold(key[-1]) == fold(path[-1])]
    if exact or moved:
        return exact or moved
    scored = [
        (_similar(path[-1], key[-1]), name)
        for name, key in dotted.items()
        if _similar(path[-1], key[-1]) >= (0.6 if key[0] == path[0] else 0.8)
    ]
    same = [(score, name) for score, name in scored if dotted[name][0] == path[0]]
    return [max(same or scored)[1]] if scored else []


class Hint(NamedTuple):
    """Help for an unknown key."""

    text: str
    """End of the error sentence, or ""."""
    suggested_keys: tuple[Path, ...]
    """Suggested keys. Errors that follow from their absence are not reported."""
    own_name: str | None
    """Counterpart in this schema of a name from another framework, or None."""


def find_hint(path: Path) -> Hint:
    """Return the help for an unknown key."""
    own_name = own_name_of(path)
    if own_name is not None:
        return Hint(
            f"; here this is {own_name}",
            tuple(key for key in KEYS if ".".join(key) in own_name),
            own_name,
        )
    near = nearest_keys(path)
    text = f"; did you mean {' or '.join(near)}?" if near else ""
    return Hint(text, tuple(split(name) for name in near), None)
