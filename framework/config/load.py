"""A TOML file and overrides -> RunConfig, or one error that lists everything that is wrong with them.

     file ---> overrides.py --+
                          +--> arrange ------------> validate ---------> rules ----------> RunConfig
     --a.b=v -> overrides.py -+    unknown keys          types, bounds       between keys
                               (keys.py, aliases)    (schema.py)         (rules.py)

Each stage continues with the valid keys of the stage before it. All stages append to one list of problems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from os import PathLike
from pathlib import Path as File
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwright.config.aliases import FAMILIAR, SHARDING, fold, own_name_of
from meshwright.config.keys import (
    KEYS,
    SECTIONS,
    Hint,
    Path,
    accepts_type,
    choices,
    describe_allowed,
    format_value,
    hint,
    nearest_section,
    nearest_value,
)
from meshwright.config.overrides import GivenKey, KeySource, MissingValue, leaves, read_file, read_overrides
from meshwright.config.rules import RULES
from meshwright.config.schema import RunConfig
from meshwright.config.secrets import find_secrets, is_secret_name, secret_message
from meshwright.errors import ConfigError
from meshwright.system.bounded import MIB, check_values, parse_json, read_text
from meshwright.terminal.output import tell

TORCHTITAN = {"job", "training", "parallelism", "experimental", "lr_scheduler", "activation_checkpoint", "profiling"}
"""Sections of torchtitan's files that do not exist here."""


class _Arranged(NamedTuple):
    """The given keys, sorted into the schema's tree."""

    tree: dict[str, dict[str, Any]]
    """section -> key -> value. Only values that passed :func:`_take`; pydantic checks types and bounds later."""
    where: dict[Path, GivenKey]
    """Key -> its last occurrence."""
    problems: list[ConfigError]
    notes: list[str]
    """Notes on values accepted under the name of another framework."""
    given: dict[Path, GivenKey]
    """Key, or key inside a table -> its last occurrence."""
    silent: set[Path]
    """Keys excluded from further checks: their value is unusable, or an unknown key probably meant them."""


def _line(given: GivenKey, said: str) -> str:
    value = (
        ""
        if given.value is MissingValue.FLAG or any(map(is_secret_name, given.path))
        else f" = {format_value(given.value)}"
    )
    return f"{given.place}: {given.key}{value}{said}"


def _unknown(given: GivenKey, path: Path, help_: Hint) -> str:
    """Return the problem text for an unknown key, with the existing keys. ``path``: its path, section corrected."""
    section, sections = path[0], "" if help_.text else f" ({', '.join(SECTIONS)})"
    if len(path) == 1:
        return _line(given, f": there is no such key outside of the sections{sections}{help_.text}")
    if section not in SECTIONS:
        return _line(given, f": there is no section {format_value(section)}{sections}{help_.text}")
    names = "" if help_.familiar else f" in [{section}] ({', '.join(key for owner, key in KEYS if owner == section)})"
    return _line(given, f": there is no such key{names}{help_.text}")


def _unusable(value: Any) -> str | None:
    """Return the reason why a value cannot be written and read back, or None. Looks into lists and tables."""
    if isinstance(value, dict):
        return next(filter(None, map(_unusable, (*value.keys(), *value.values()))), None)
    if isinstance(value, list):
        return next(filter(None, map(_unusable, value)), None)
    if isinstance(value, date | datetime | time):
        return "a date is not allowed; text goes in quotes"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "not valid UTF-8"
    return None


def _put(tree: dict[str, dict[str, Any]], path: Path, value: Any) -> None:
    """Set a key, or a key inside a table (``model.options.x``); tables are copied, never changed in place."""
    table: dict[str, Any] = tree[path[0]]
    for name in path[1:-1]:
        inner = table.get(name)
        table[name] = dict(inner) if isinstance(inner, dict) else {}
        table = table[name]
    table[path[-1]] = value


def _misspelled(given: GivenKey) -> Path | None:
    """Return the path of a key with its misspelled section corrected, or None. Checks then use the corrected path."""
    path = given.path
    if path[0] in SECTIONS or len(path) == 1 or fold(given.key) in FAMILIAR:
        return None
    section = nearest_section(path[0])
    if section is None:
        return None
    corrected = (section, *path[1:])
    return corrected if corrected[:2] in KEYS or own_name_of(path) is None else None


def _arrange(all_given: Sequence[GivenKey]) -> _Arranged:
    to = _Arranged({section: {} for section in SECTIONS}, {}, [], [], {}, set())
    known = to.given  # in the order in which they take effect
    told: set[tuple[str, str]] = set()
    for given in all_given:
        corrected = _misspelled(given)
        path = corrected or given.path
        key = path[:2]
        if corrected is not None and (given.place, given.path[0]) not in told:
            told.add((given.place, given.path[0]))
            to.problems.append(
                ConfigError(
                    "MW-CONFIG-011",
                    f"{given.place}: [{given.path[0]}]: there is no such section; did you mean [{path[0]}]?",
                )
            )
        if len(path) == 1 and path[0] in SECTIONS:
            to.problems.append(
                ConfigError(
                    "MW-CONFIG-012",
                    _line(given, f": this is a section; its keys are set one by one, as in {path[0]}.KEY"),
                )
            )
            to.silent.update(k for k in KEYS if k[0] == path[0])
        elif key not in KEYS:
            help_ = hint(path)
            to.problems.append(ConfigError("MW-CONFIG-013", _unknown(given, path, help_)))
            to.silent.update(help_.meant)
        elif len(path) > 2 and not accepts_type(key, dict):
            to.problems.append(
                ConfigError(
                    "MW-CONFIG-014",
                    _line(given, f": {'.'.join(key)} has no keys below it; it is {describe_allowed(key)}"),
                )
            )
            to.silent.add(key)
        else:
            known.pop(path, None)
            known[path] = given
    for path, given in known.items():
        _take(to, path, given)
    zero = known.get(("parallel", "zero"))
    if zero is not None and fold(str(zero.value)) == "hybridshard" and ("parallel", "shard_factor") not in known:
        to.problems.append(
            ConfigError(
                "MW-CONFIG-015", _line(zero, " needs parallel.shard_factor: the replicas in a node, which are to share")
            )
        )
    return to


def _take(to: _Arranged, path: Path, given: GivenKey) -> None:
    """Put one value at an existing key into the tree, unless it is unusable."""
    key, value = path[:2], given.value
    to.where[key] = given
    found = list(find_secrets(value, path)) if key[1] == "options" else []
    if found:
        to.problems.extend(ConfigError("MW-CONFIG-016", f"{given.place}: {secret_message(secret)}") for secret in found)
        to.silent.add(key)
        return
    if value is MissingValue.FLAG and accepts_type(key, bool):
        value = True
    if key == ("parallel", "zero") and isinstance(value, str) and fold(value) in SHARDING:
        to.notes.append(_line(given, f" is zero = {SHARDING[fold(value)]} here"))
        value = SHARDING[fold(value)]
    if value is MissingValue.FLAG:
        problem = ConfigError("MW-CONFIG-017", _line(given, f" needs a value: {describe_allowed(key)}"))
    elif isinstance(value, bool) and len(path) == 2 and not accepts_type(key, bool):
        # pydantic accepts true for a literal 1
        problem = ConfigError("MW-CONFIG-018", _line(given, f" is not allowed: {describe_allowed(key)}"))
    elif (why := _unusable(value)) is not None:
        problem = ConfigError("MW-CONFIG-019", _line(given, f" cannot be used ({why}): {describe_allowed(key)}"))
    else:
        _put(to.tree, path, value)
        return
    to.problems.append(problem)
    to.silent.add(key)


def _not_allowed(given: GivenKey, key: Path) -> str:
    near = nearest_value(key, given.value) if choices(key) else None
    meant = f"; did you mean {near if near in ('true', 'false') else format_value(near)}?" if near else ""
    return _line(given, f" is not allowed: {describe_allowed(key)}{meant}")


def _validate(arranged: _Arranged, place: str, *, whole: bool) -> RunConfig:
    """Build the typed tree. Adds to the problems and the silent keys; a bad value is replaced by its default.

    ``whole``: report missing keys that have no default. False when the file could not be read at all.
    """
    # JSON, because strict pydantic then accepts a list for a tuple and a whole number for a float, and nothing else.
    try:
        return RunConfig.model_validate_json(json.dumps(arranged.tree))
    except ValidationError as error:
        found: list[Path] = list(dict.fromkeys((str(e["loc"][0]), str(e["loc"][1])) for e in error.errors()))
    for key in found:
        if key[1] in arranged.tree[key[0]]:
            arranged.problems.append(ConfigError("MW-CONFIG-020", _not_allowed(arranged.where[key], key)))
            del arranged.tree[key[0]][key[1]]
        elif whole and key not in arranged.silent:
            name = ".".join(key)
            arranged.problems.append(
                ConfigError(
                    "MW-CONFIG-021",
                    f"{place}: {name} is missing: {describe_allowed(key)}; or --{name}=... on the command line",
                )
            )
    arranged.silent.update(found)
    for key, field in KEYS.items():
        if field.is_required() and key[1] not in arranged.tree[key[0]]:
            assert accepts_type(key, str), key
            arranged.tree[key[0]][key[1]] = ""
    return RunConfig.model_validate_json(json.dumps(arranged.tree))


def _between_keys(config: RunConfig, arranged: _Arranged, place: str) -> list[ConfigError]:
    """Return the broken rules between keys, among those whose keys are all valid."""
    lines: list[ConfigError] = []
    for rule in RULES:
        said = None if arranged.silent.intersection(rule.keys) else rule.broken(config)
        if said is not None:
            places = dict.fromkeys(arranged.where[key].place for key in rule.keys if key in arranged.where)
            lines.append(ConfigError(rule.code, f"{' and '.join(places) or place}: {said}"))
    return lines


def load(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration in a TOML file, with command-line overrides on top.

    Args:
        path: The TOML file.
        overrides: ``--section.key=value``, ``--section.key value``, or ``--section.key`` alone for true. Values are
            TOML, otherwise text. ``none`` unsets a key that may be unset. Later words win, and win over the file.

    Raises:
        ConfigError: Every problem, one per line: place, key, value, allowed values, likely intended key.
    """
    return _put_together(read_file(File(path)), overrides, str(path))


def load_with_origins(path: str | PathLike[str], overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[Path, str]]:
    """Load a configuration and return the origin of each given key: the file, or the command line.

    In a table (``model.options``) each key has its own origin, unless the table was given as a whole.
    """
    file, words = read_file(File(path)), read_overrides(overrides)
    config = load(path, overrides)
    return config, {key: given.place for key, given in _arrange([*file.given, *words.given]).given.items()}


def load_saved(saved: Mapping[str, Any], overrides: Sequence[str], place: str) -> RunConfig:
    """Load a configuration that was saved as JSON, with command-line overrides on top. Every check for a file applies.

    ``place`` names the saved configuration in errors. Raises :class:`ConfigError` as :func:`load` does.
    """
    return _put_together(KeySource(list(leaves(dict(saved), place)), []), overrides, place)


def _put_together(file: KeySource, overrides: Sequence[str], place: str) -> RunConfig:
    words = read_overrides(overrides)
    arranged = _arrange([*file.given, *words.given])
    config = _validate(arranged, place, whole=not file.problems)
    between = [] if file.problems else _between_keys(config, arranged, place)
    problems = [*file.problems, *words.problems, *_of_others(file, place), *arranged.problems, *between]
    if problems:
        raise ConfigError.join(problems)
    for note in arranged.notes:
        tell(f"config: {note}")
    return config


def _of_others(file: KeySource, place: str) -> list[ConfigError]:
    """Return advice for a user who gives another framework's file unchanged."""
    sections = {given.path[0] for given in file.given if len(given.path) > 1}
    if len(sections & TORCHTITAN) >= 2:
        return [
            ConfigError(
                "MW-CONFIG-022",
                f"{place}: this is a configuration of torchtitan: `meshwright config import {place}` makes one of ours",
            )
        ]
    if file.problems and File(place).is_file() and File(place).suffix in (".yaml", ".yml", ".sh"):
        return [
            ConfigError(
                "MW-CONFIG-023",
                f"{place}: `meshwright config import {place}` reads nanotron's YAML and scripts of Megatron-LM",
            )
        ]
    return []


def parse(text: str, place: str = "resolved configuration") -> RunConfig:
    """Parse the configuration that :func:`dump` wrote. ``place`` names the text in errors.

    Checks each key by itself, not the rules between keys: a configuration made in code may break them.
    """
    try:
        document = parse_json(text)
        check_values(document)
    except ValueError as error:
        raise ConfigError(
            "MW-CONFIG-024", f"{place}: not valid JSON: {error}; write it again from its TOML file"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(
            "MW-CONFIG-025",
            f"{place}: {format_value(document)} is not a configuration: a JSON object of sections is needed",
        )
    arranged = _arrange(list(leaves(document, place)))
    config = _validate(arranged, place, whole=True)
    if arranged.problems:
        raise ConfigError.join(arranged.problems)
    return config


def read_resolved(path: File) -> RunConfig:
    """Return the configuration in a run's ``resolved.json``.

    Raises:
        ConfigError: The file cannot be read, or :func:`parse` refuses its text.
    """
    try:
        return parse(read_text(path, MIB), str(path))
    except OSError as error:
        raise ConfigError("MW-CONFIG-026", f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            "MW-CONFIG-027", f"{path}: not UTF-8 (byte {error.start}); write it again from its TOML file"
        ) from None


def dump(config: RunConfig) -> str:
    """Return the JSON for ``resolved.json``: every key, defaults included. :func:`parse` returns an equal object."""
    return json.dumps(config.model_dump(), indent=2, allow_nan=False) + "\n"
