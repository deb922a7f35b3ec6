"""Loading of a configuration: TOML file and overrides -> RunConfig, or one error that lists all problems.

     file ----> sources.py --+
                             +--> arrange ---------> validate --------> rules -----------> RunConfig
     --a.b=v -> sources.py --+    unknown keys       types, bounds      contradictions
                                  (keys.py, aliases) (schema.py)        (*rules.py)

Each stage continues with the valid keys of the stage before it. All stages append to one list of problems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from os import PathLike
from pathlib import Path as File
from typing import Any

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
    find_hint,
    find_open,
    format_value,
    nearest_section,
    nearest_value,
    null_problem,
)
from meshwright.config.layout_rules import LAYOUT_RULES
from meshwright.config.optimizer_rules import OPTIMIZER_RULES, find_contradiction
from meshwright.config.rules import RULES
from meshwright.config.schema import RunConfig
from meshwright.config.sources import (
    GivenKey,
    KeySource,
    MissingValue,
    find_secrets,
    leaves,
    read_file,
    read_overrides,
    secret_message,
)
from meshwright.config.training import BUILDER_DEFAULTS
from meshwright.errors import ConfigError
from meshwright.system.secret_text import hide_secrets, is_secret_name
from meshwright.terminal.output import tell

TORCHTITAN = {"job", "training", "parallelism", "experimental", "lr_scheduler", "activation_checkpoint", "profiling"}
"""Sections of torchtitan's files that do not exist in this schema."""


@dataclass
class KeyTree:
    """The given keys, sorted into the schema's tree."""

    tree: dict[str, dict[str, Any]] = field(default_factory=lambda: {section: {} for section in SECTIONS})
    """section -> key -> value. Only values that passed :meth:`take`; pydantic checks types and bounds later."""
    where: dict[Path, GivenKey] = field(default_factory=dict)
    """Key -> its last occurrence."""
    problems: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on values accepted under the name of another framework."""
    given: dict[Path, GivenKey] = field(default_factory=dict)
    """Key, or key inside a table -> its last occurrence."""
    suppressed: set[Path] = field(default_factory=set)
    """Keys excluded from further checks: their value is unusable, or an unknown key was probably meant to be them."""

    def refuse(self, code: str, message: str, *suppressed: Path) -> None:
        """Add a problem, and exclude the keys ``suppressed`` from further checks."""
        self.problems.append(ConfigError(code, message))
        self.suppressed.update(suppressed)

    def take(self, path: Path, given: GivenKey) -> None:
        """Put the value of an existing key into the tree, unless it is unusable."""
        key, value = path[:2], given.value
        self.where[key] = given
        secrets = list(find_secrets(value, path))
        for secret in secrets:
            self.refuse("MW-CONFIG-016", secret_message(secret, given.place), key)
        if secrets:
            return
        if (null := null_problem(path, value, given.place)) is not None:
            self.problems.append(null)
            self.suppressed.add(key)
            return
        if value is MissingValue.FLAG and accepts_type(key, bool):
            value = True
        if key == ("parallel", "zero") and isinstance(value, str) and fold(value) in SHARDING:
            self.notes.append(_line(given, f" is zero = {SHARDING[fold(value)]} here"))
            value = SHARDING[fold(value)]
        to_set = [".".join(name) for name in find_open(value, path) if name == path or name not in self.given]
        for name in to_set:
            self.refuse("MW-CONFIG-058", f"{given.place}: {name} is still to be set: there, or as --{name}=VALUE", key)
        if to_set:
            return
        if value is MissingValue.FLAG:
            self.refuse("MW-CONFIG-017", _line(given, f" needs a value: {describe_allowed(key)}"), key)
        elif isinstance(value, bool) and len(path) == 2 and not accepts_type(key, bool):
            # pydantic accepts true for a literal 1
            self.refuse("MW-CONFIG-018", _line(given, f" is not allowed: {describe_allowed(key)}"), key)
        elif (why := _unusable(value)) is not None:
            self.refuse("MW-CONFIG-019", _line(given, f" cannot be used ({why}): {describe_allowed(key)}"), key)
        else:
            _put(self.tree, path, value)


def _line(given: GivenKey, text: str) -> str:
    """Return the message of a problem: place, key and value (left out if it may be a secret), then ``text``."""
    is_hidden = given.value is MissingValue.FLAG or any(map(is_secret_name, given.path))
    value = "" if is_hidden else f" = {hide_secrets(format_value(given.value))}"
    return f"{given.place}: {given.key}{value}{text}"


def _unknown(given: GivenKey, path: Path, hint: Hint) -> str:
    """Return the problem text for an unknown key, with the existing keys. ``path``: its path, section corrected."""
    section, sections = path[0], "" if hint.text else f" ({', '.join(SECTIONS)})"
    if len(path) == 1:
        return _line(given, f": there is no such key outside of the sections{sections}{hint.text}")
    if section not in SECTIONS:
        return _line(given, f": there is no section {format_value(section)}{sections}{hint.text}")
    names = "" if hint.own_name else f" in [{section}] ({', '.join(key for owner, key in KEYS if owner == section)})"
    return _line(given, f": there is no such key{names}{hint.text}")


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
    if isinstance(value, str) and "\x00" in value:
        return "it has a NUL character"
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


def arrange(all_given: Sequence[GivenKey]) -> KeyTree:
    """Sort the given keys into the schema's tree. A later key replaces an earlier one."""
    arranged = KeyTree()
    reported: set[tuple[str, str]] = set()
    for given in all_given:
        corrected = _misspelled(given)
        path = corrected or given.path
        key = path[:2]
        if corrected is not None and (given.place, given.path[0]) not in reported:
            reported.add((given.place, given.path[0]))
            arranged.refuse(
                "MW-CONFIG-011",
                f"{given.place}: [{given.path[0]}]: there is no such section; did you mean [{path[0]}]?",
            )
        if len(path) == 1 and path[0] in SECTIONS:
            its_keys = [key for key in KEYS if key[0] == path[0]]
            arranged.refuse(
                "MW-CONFIG-012",
                _line(given, f": this is a section; its keys are set one by one, as in {path[0]}.KEY"),
                *its_keys,
            )
        elif key not in KEYS:
            hint = find_hint(path)
            arranged.refuse("MW-CONFIG-013", _unknown(given, path, hint), *hint.suggested_keys)
        elif len(path) > 2 and not accepts_type(key, dict):
            arranged.refuse(
                "MW-CONFIG-014",
                _line(given, f": {'.'.join(key)} has no keys below it; it is {describe_allowed(key)}"),
                key,
            )
        else:
            arranged.given.pop(path, None)  # keys take effect in the order of this dict
            arranged.given[path] = given
    for path, given in arranged.given.items():
        arranged.take(path, given)
    zero, factor = arranged.given.get(("parallel", "zero")), arranged.given.get(("parallel", "shard_factor"))
    if zero is not None and fold(str(zero.value)) == "hybridshard" and factor is None:
        arranged.refuse("MW-CONFIG-015", _line(zero, " needs parallel.shard_factor, the number of replicas in a node"))
    return arranged


def _not_allowed(given: GivenKey, key: Path) -> str:
    near = nearest_value(key, given.value) if choices(key) else None
    suggestion = f"; did you mean {near if near in ('true', 'false') else format_value(near)}?" if near else ""
    return _line(given, f" is not allowed: {describe_allowed(key)}{suggestion}")


def validate(arranged: KeyTree) -> RunConfig:
    """Build the typed tree. Adds to the problems and suppressed keys; a bad value is replaced by its default."""
    # JSON, because strict pydantic then accepts a list for a tuple and a whole number for a float, and nothing else.
    try:
        return RunConfig.model_validate_json(json.dumps(arranged.tree))
    except ValidationError as error:
        found: list[Path] = list(dict.fromkeys((str(e["loc"][0]), str(e["loc"][1])) for e in error.errors()))
    for key in found:
        arranged.refuse("MW-CONFIG-020", _not_allowed(arranged.where[key], key), key)
        del arranged.tree[key[0]][key[1]]
    return RunConfig.model_validate_json(json.dumps(arranged.tree))


def _check_rules(config: RunConfig, arranged: KeyTree, place: str) -> list[ConfigError]:
    """Return the broken rules between keys. A rule with an invalid key is not checked."""
    problems: list[ConfigError] = []
    for rule in (*LAYOUT_RULES, *RULES, *OPTIMIZER_RULES):
        message = None if arranged.suppressed.intersection(rule.keys) else rule.check(config)
        if message is not None:
            places = dict.fromkeys(arranged.where[key].place for key in rule.keys if key in arranged.where)
            problems.append(ConfigError(rule.code, f"{' and '.join(places) or place}: {message}"))
    return problems


def _check_contradictions(config: RunConfig, arranged: KeyTree) -> list[ConfigError]:
    """Return the contradictions between keys of [optimizer] and options of its builder, of the keys that were given.

    A key given with the value of its default contradicts another option too; rules between keys cannot see that.
    """
    given = {key: at.place for (section, key), at in arranged.where.items() if section == "optimizer"}
    message = find_contradiction(config.optimizer, sorted(given.keys() - set(BUILDER_DEFAULTS)))
    if message is None:
        return []
    return [ConfigError("MW-CONFIG-081", f"{given['options']}: {message}")]


def load(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration in a TOML file, with command-line overrides on top.

    Args:
        path: The TOML file.
        overrides: ``--section.key=value``, ``--section.key value``, or ``--section.key`` alone for true. Values are
            TOML, otherwise text. ``none`` unsets a key that may be unset. Later words win, and win over the file.

    Raises:
        ConfigError: Every problem, one per line: place, key, value, allowed values, likely intended key.
    """
    return _load(read_file(File(path)), overrides, str(path))[0]


def load_with_origins(path: str | PathLike[str], overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[Path, str]]:
    """Load a configuration and return the origin of each given key: the file, or the command line.

    In a table (``model.options``) each key has its own origin, unless the table was given as a whole.
    """
    config, arranged = _load(read_file(File(path)), overrides, str(path))
    return config, {key: given.place for key, given in arranged.given.items()}


def load_saved(saved: Mapping[str, Any], overrides: Sequence[str], place: str) -> RunConfig:
    """Load a configuration that was saved as JSON, with command-line overrides on top. Every check for a file applies.

    ``place`` names the saved configuration in errors. Raises :class:`ConfigError` as :func:`load` does.
    """
    return _load(KeySource(list(leaves(dict(saved), place)), []), overrides, place, is_saved=True)[0]


def _load(
    file: KeySource, overrides: Sequence[str], place: str, *, is_saved: bool = False
) -> tuple[RunConfig, KeyTree]:
    """Load a configuration from the keys of a file and overrides; return it with the arranged keys.

    ``is_saved``: the file has every key, also those that were not set.
    """
    words = read_overrides(overrides)
    arranged = arrange([*file.given, *words.given])
    config = validate(arranged)
    broken_rules = [] if file.problems else _check_rules(config, arranged, place)
    if not is_saved and not broken_rules:
        broken_rules = _check_contradictions(config, arranged)
    problems = [*file.problems, *words.problems, *_advise_import(file, place), *arranged.problems, *broken_rules]
    if problems:
        raise ConfigError.join(problems)
    for note in arranged.notes:
        tell(f"config: {note}")
    return config, arranged


def _advise_import(file: KeySource, place: str) -> list[ConfigError]:
    """Return the advice to import a file of another framework, as an error."""
    sections = {given.path[0] for given in file.given if len(given.path) > 1}
    command = f"meshwright config import {place}"
    if len(sections & TORCHTITAN) >= 2:
        return [ConfigError("MW-CONFIG-022", f"{place}: a configuration of torchtitan: `{command}` converts it")]
    if file.problems and File(place).is_file() and File(place).suffix in ("", ".yaml", ".yml", ".txt", ".sh"):
        return [ConfigError("MW-CONFIG-023", f"{place}: `{command}` reads nanotron's YAML and Megatron-LM's flags")]
    return []
