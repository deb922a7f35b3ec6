"""Checks of single values, before types and bounds: secrets, nulls, values that are missing or that
cannot be written and read back.

Each takes a key and all keys that are given, and returns problems; :data:`VALUE_CHECKS` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from typing import Any

from meshwright.config.aliases import SHARDING, fold
from meshwright.config.keys import (
    Path,
    accepts_type,
    choices,
    describe_allowed,
    find_open,
    format_value,
    nearest_value,
    null_problem,
)
from meshwright.config.sources import GivenKey, MissingValue, find_secrets, secret_message
from meshwright.errors import ConfigError
from meshwright.system.secret_text import hide_secrets, is_secret_name

Given = Mapping[Path, GivenKey]
"""Key, or key inside a table -> its last occurrence."""


def problem_text(given: GivenKey, text: str) -> str:
    """Return the message of a problem: place, key and value (left out if it may be a secret),
    then ``text``.
    """
    is_hidden = given.value is MissingValue.FLAG or any(map(is_secret_name, given.path))
    value = "" if is_hidden else f" = {hide_secrets(format_value(given.value))}"
    return f"{given.place}: {given.key}{value}{text}"


def translated(key: Path, value: Any) -> Any:
    """Return the value of this schema for a flag, or for the name of another framework;
    any other value as it is.
    """
    if value is MissingValue.FLAG and accepts_type(key, bool):
        return True
    if key == ("parallel", "zero") and isinstance(value, str):
        return SHARDING.get(fold(value), value)
    return value


def find_value_problems(path: Path, given: GivenKey, every: Given) -> list[ConfigError]:
    """Return the problems of the first check that finds some."""
    for check in VALUE_CHECKS:
        problems = check(path, given, every)
        if problems:
            return problems
    return []


def _secrets(path: Path, given: GivenKey, every: Given) -> list[ConfigError]:
    return [
        ConfigError("MW-CONFIG-016", secret_message(secret, given.place))
        for secret in find_secrets(given.value, path)
    ]


def _nulls(path: Path, given: GivenKey, every: Given) -> list[ConfigError]:
    problem = null_problem(path, given.value, given.place)
    return [] if problem is None else [problem]


def _still_open(path: Path, given: GivenKey, every: Given) -> list[ConfigError]:
    names = [
        ".".join(name)
        for name in find_open(given.value, path)
        if name == path or name not in every  # another key sets it
    ]
    return [
        ConfigError(
            "MW-CONFIG-058",
            f"{given.place}: {name} is still to be set: there, or as --{name}=VALUE",
        )
        for name in names
    ]


def _without_value(path: Path, given: GivenKey, every: Given) -> list[ConfigError]:
    if given.value is not MissingValue.FLAG:
        return []
    text = problem_text(given, f" needs a value: {describe_allowed(path[:2])}")
    return [ConfigError("MW-CONFIG-017", text)]


def _no_boolean(path: Path, given: GivenKey, every: Given) -> list[ConfigError]:
    # pydantic accepts true for a literal 1
    if not isinstance(given.value, bool) or len(path) > 2 or accepts_type(path, bool):
        return []
    text = problem_text(given, f" is not allowed: {describe_allowed(path)}")
    return [ConfigError("MW-CONFIG-018", text)]


def _unusable_value(path: Path, given: GivenKey, every: Given) -> list[ConfigError]:
    why = _unusable(given.value)
    if why is None:
        return []
    text = problem_text(given, f" cannot be used ({why}): {describe_allowed(path[:2])}")
    return [ConfigError("MW-CONFIG-019", text)]


VALUE_CHECKS: tuple[Callable[[Path, GivenKey, Given], list[ConfigError]], ...] = (
    _secrets,
    _nulls,
    _still_open,
    _without_value,
    _no_boolean,
    _unusable_value,
)
"""Checks of the value of one key, in their order. Each takes the key's path, the key, and all keys
that are given.
"""


def _unusable(value: Any) -> str | None:
    """Return the reason why a value cannot be written and read back, or None.
    Looks into lists and tables.
    """
    if isinstance(value, dict):
        return next(filter(None, map(_unusable, (*value.keys(), *value.values()))), None)
    if isinstance(value, list):
        return next(filter(None, map(_unusable, value)), None)
    if isinstance(value, date | datetime | time):
        return "a date is not allowed; text goes in quotes"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    if isinstance(value, str) and "\x00" in value:
        return "it has a NUL character"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "not valid UTF-8"
    return None


def wrong_type(key: Path, given: GivenKey) -> ConfigError:
    """Return the error for a value whose type or bounds the schema excludes,
    with the closest allowed word.
    """
    near = nearest_value(key, given.value) if choices(key) else None
    suggestion = ""
    if near:
        word = near if near in ("true", "false") else format_value(near)
        suggestion = f"; did you mean {word}?"
    text = problem_text(given, f" is not allowed: {describe_allowed(key)}{suggestion}")
    return ConfigError("MW-CONFIG-020", text)
