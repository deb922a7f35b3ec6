"""Loading of a configuration: TOML file and overrides -> RunConfig,
or one error that lists all problems.

     file ----> sources.py --+
                             +--> paths ----------> values ----------> types -------> rules ---------> RunConfig
     --a.b=v -> sources.py --+    unknown keys      single values      bounds         contradictions
                                  (keys.py,         (value_checks.py)  (schema.py)    (*rules.py)
                                  aliases.py)

Each check of :data:`CHECKS` continues with the valid keys of the check before it. All append to one
list of problems.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path as File
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwright.config.aliases import FAMILIAR, fold, own_name_of
from meshwright.config.combinations.rules import COMBINATION_RULES
from meshwright.config.keys import (
    KEYS,
    SECTIONS,
    Hint,
    Path,
    accepts_type,
    describe_allowed,
    find_hint,
    format_value,
    nearest_section,
)
from meshwright.config.layout_rules import LAYOUT_RULES
from meshwright.config.optimizer_rules import OPTIMIZER_RULES, find_contradiction
from meshwright.config.rules import RULES
from meshwright.config.schema import RunConfig
from meshwright.config.sources import GivenKey, KeySource, leaves, read_file, read_overrides
from meshwright.config.training import BUILDER_DEFAULTS
from meshwright.config.value_checks import find_value_problems, problem_text, translated, wrong_type
from meshwright.errors import ConfigError
from meshwright.terminal.output import tell

TORCHTITAN = {
    "job",
    "training",
    "parallelism",
    "experimental",
    "lr_scheduler",
    "activation_checkpoint",
    "profiling",
}
"""Sections of torchtitan's files that do not exist in this schema."""


@dataclass
class Loading:
    """A configuration while it is loaded: the keys as given, and what the checks make of them."""

    written: Sequence[GivenKey]
    """Keys as written, in order. A later one replaces an earlier one."""
    place: str
    """Name of the source, for problems that no key has."""
    problems: list[ConfigError] = field(default_factory=list)
    has_all_keys: bool = True
    """False after a syntax error, which may have hidden keys: rules between keys do not apply."""
    is_saved: bool = False
    """The source has every key, also those that were not set."""

    given: dict[Path, GivenKey] = field(default_factory=dict)
    """Key, or key inside a table -> its last occurrence. Set by :func:`check_paths`."""
    where: dict[Path, GivenKey] = field(default_factory=dict)
    """Key -> its last occurrence. Set by :func:`check_values`, and so are ``tree`` and ``notes``."""
    tree: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {section: {} for section in SECTIONS}
    )
    """section -> key -> value. Only values that no check has refused."""
    notes: list[str] = field(default_factory=list)
    """Notes on values accepted under the name of another framework."""
    suppressed: set[Path] = field(default_factory=set)
    """Keys excluded from further checks: their value is unusable,
    or an unknown key was probably meant to be them.
    """
    config: RunConfig = field(default_factory=RunConfig)
    """The tree with its types. Set by :func:`check_types`."""

    def refuse(self, problems: Sequence[ConfigError], *suppressed: Path) -> None:
        """Add problems, and exclude the keys ``suppressed`` from further checks."""
        self.problems.extend(problems)
        self.suppressed.update(suppressed)


def check_paths(loading: Loading) -> None:
    """Refuse keys that do not exist. The last occurrence of every other key counts."""
    reported: set[tuple[str, str]] = set()
    for given in loading.written:
        corrected = _misspelled(given)
        path = corrected or given.path
        if corrected is not None and (given.place, given.path[0]) not in reported:
            reported.add((given.place, given.path[0]))
            loading.refuse([_misspelled_section(given, path)])
        problem = _find_path_problem(path, given)
        if problem is not None:
            loading.refuse([problem.error], *problem.suppressed)
        else:
            loading.given.pop(path, None)  # keys take effect in the order of this dict
            loading.given[path] = given


def check_values(loading: Loading) -> None:
    """Refuse unusable values, and put the others into the tree."""
    for path, given in loading.given.items():
        key = path[:2]
        loading.where[key] = given
        value = translated(key, given.value)
        if isinstance(given.value, str) and value != given.value:
            loading.notes.append(problem_text(given, f" is {key[1]} = {value} here"))
        problems = find_value_problems(path, given._replace(value=value), loading.given)
        if problems:
            loading.refuse(problems, key)
        else:
            _put(loading.tree, path, value)


def check_hybrid_shard(loading: Loading) -> None:
    """Refuse FSDP's name of sharding inside a node without the number of replicas in one."""
    zero = loading.given.get(("parallel", "zero"))
    factor = loading.given.get(("parallel", "shard_factor"))
    if zero is not None and fold(str(zero.value)) == "hybridshard" and factor is None:
        text = problem_text(zero, " needs parallel.shard_factor, the number of replicas in a node")
        loading.refuse([ConfigError("MW-CONFIG-015", text)])


def check_types(loading: Loading) -> None:
    """Build the typed configuration. A value that the schema excludes is refused,
    and replaced by its default.
    """
    # JSON, because strict pydantic then accepts a list for a tuple and a whole number for a float,
    # and nothing else.
    try:
        loading.config = RunConfig.model_validate_json(json.dumps(loading.tree))
        return
    except ValidationError as error:
        found: list[Path] = list(
            dict.fromkeys((str(e["loc"][0]), str(e["loc"][1])) for e in error.errors())
        )
    for key in found:
        loading.refuse([wrong_type(key, loading.where[key])], key)
        del loading.tree[key[0]][key[1]]
    loading.config = RunConfig.model_validate_json(json.dumps(loading.tree))


def check_rules(loading: Loading) -> None:
    """Refuse keys that contradict each other; a rule with an unusable key does not apply."""
    broken = _broken_rules(loading) if loading.has_all_keys else []
    if not broken and not loading.is_saved:
        broken = _contradictions(loading)
    loading.refuse(broken)


KEY_CHECKS: tuple[Callable[[Loading], None], ...] = (
    check_paths,
    check_values,
    check_hybrid_shard,
    check_types,
)
"""Checks of single keys, in their order."""
CHECKS: tuple[Callable[[Loading], None], ...] = (*KEY_CHECKS, check_rules)
"""Checks of a configuration, in their order."""


def run_checks(loading: Loading, checks: Sequence[Callable[[Loading], None]] = CHECKS) -> RunConfig:
    """Return the configuration after these checks.

    Raises:
        ConfigError: All problems.
    """
    for check in checks:
        check(loading)
    if loading.problems:
        raise ConfigError.join(loading.problems)
    return loading.config


def load(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration in a TOML file, with command-line overrides on top.

    Args:
        path: The TOML file.
        overrides: ``--section.key=value``, ``--section.key value``, or ``--section.key`` alone for
            true. Values are TOML, otherwise text. ``none`` unsets a key that may be unset. Later
            words win, and win over the file.

    Raises:
        ConfigError: Every problem, one per line: place, key, value, allowed values, likely intended
            key.
    """
    return _load(read_file(File(path)), overrides, str(path)).config


def load_with_origins(
    path: str | PathLike[str], overrides: Sequence[str] = ()
) -> tuple[RunConfig, dict[Path, str]]:
    """Load a configuration and return the origin of each given key: the file, or the command line.

    In a table (``model.options``) each key has its own origin, unless the table was given as a
    whole.
    """
    loaded = _load(read_file(File(path)), overrides, str(path))
    return loaded.config, {key: given.place for key, given in loaded.given.items()}


def load_keys(overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a command line alone, each key checked by itself.

    Raises:
        ConfigError: Every problem of a key. Rules between keys do not apply.
    """
    words = read_overrides(overrides)
    return run_checks(Loading(words.given, "command line", list(words.problems)), KEY_CHECKS)


def load_saved(saved: Mapping[str, Any], overrides: Sequence[str], place: str) -> RunConfig:
    """Load a configuration that was saved as JSON, with command-line overrides on top.
    Every check for a file applies.

    ``place`` names the saved configuration in errors. Raises :class:`ConfigError` as :func:`load`
    does.
    """
    source = KeySource(list(leaves(dict(saved), place)), [])
    return _load(source, overrides, place, is_saved=True).config


def _load(
    file: KeySource, overrides: Sequence[str], place: str, *, is_saved: bool = False
) -> Loading:
    """Load a configuration from the keys of a file and overrides."""
    words = read_overrides(overrides)
    loading = Loading(
        [*file.given, *words.given],
        place,
        [*file.problems, *words.problems, *_advise_import(file, place)],
        has_all_keys=not file.problems,
        is_saved=is_saved,
    )
    run_checks(loading)
    for note in loading.notes:
        tell(f"config: {note}")
    return loading


def _misspelled(given: GivenKey) -> Path | None:
    """Return the path of a key with its misspelled section corrected, or None.
    Checks then use the corrected path.
    """
    path = given.path
    is_known = path[0] in SECTIONS or len(path) == 1 or fold(given.key) in FAMILIAR
    section = None if is_known else nearest_section(path[0])
    if section is None:
        return None
    corrected = (section, *path[1:])
    return corrected if corrected[:2] in KEYS or own_name_of(path) is None else None


def _misspelled_section(given: GivenKey, path: Path) -> ConfigError:
    return ConfigError(
        "MW-CONFIG-011",
        f"{given.place}: [{given.path[0]}]: there is no such section; did you mean [{path[0]}]?",
    )


class PathProblem(NamedTuple):
    """A path that no key has."""

    error: ConfigError
    suppressed: Iterable[Path]
    """Keys that were probably meant, which are not checked any further."""


def _find_path_problem(path: Path, given: GivenKey) -> PathProblem | None:
    """Return the problem with a path; None for that of a key, or of one inside a table."""
    key = path[:2]
    if len(path) == 1 and path[0] in SECTIONS:
        text = problem_text(
            given, f": this is a section; its keys are set one by one, as in {path[0]}.KEY"
        )
        its_keys = [key for key in KEYS if key[0] == path[0]]
        return PathProblem(ConfigError("MW-CONFIG-012", text), its_keys)
    if key not in KEYS:
        hint = find_hint(path)
        error = ConfigError("MW-CONFIG-013", _unknown(given, path, hint))
        return PathProblem(error, hint.suggested_keys)
    if len(path) > 2 and not accepts_type(key, dict):
        text = problem_text(
            given, f": {'.'.join(key)} has no keys below it; it is {describe_allowed(key)}"
        )
        return PathProblem(ConfigError("MW-CONFIG-014", text), [key])
    return None


def _unknown(given: GivenKey, path: Path, hint: Hint) -> str:
    """Return the problem text for an unknown key, with the existing keys. ``path``: its path,
    section corrected.
    """
    section, sections = path[0], "" if hint.text else f" ({', '.join(SECTIONS)})"
    if len(path) == 1:
        return problem_text(
            given, f": there is no such key outside of the sections{sections}{hint.text}"
        )
    if section not in SECTIONS:
        return problem_text(
            given, f": there is no section {format_value(section)}{sections}{hint.text}"
        )
    names = ""
    if not hint.own_name:
        names = f" in [{section}] ({', '.join(key for owner, key in KEYS if owner == section)})"
    return problem_text(given, f": there is no such key{names}{hint.text}")


def _put(tree: dict[str, dict[str, Any]], path: Path, value: Any) -> None:
    """Set a key, or a key inside a table (``model.options.x``); tables are copied,
    never changed in place.
    """
    table: dict[str, Any] = tree[path[0]]
    for name in path[1:-1]:
        inner = table.get(name)
        table[name] = dict(inner) if isinstance(inner, dict) else {}
        table = table[name]
    table[path[-1]] = value


def _broken_rules(loading: Loading) -> list[ConfigError]:
    """Return the broken rules between keys. A rule with an unusable key is not checked."""
    problems: list[ConfigError] = []
    for rule in (*COMBINATION_RULES, *LAYOUT_RULES, *RULES, *OPTIMIZER_RULES):
        if loading.suppressed.intersection(rule.keys):
            continue
        message = rule.check(loading.config)
        if message is not None:
            places = dict.fromkeys(
                loading.where[key].place for key in rule.keys if key in loading.where
            )
            where = " and ".join(places) or loading.place
            problems.append(ConfigError(rule.code, f"{where}: {message}"))
    return problems


def _contradictions(loading: Loading) -> list[ConfigError]:
    """Return the contradictions between keys of [optimizer] and options of its builder,
    of the keys that were given.

    A key given with the value of its default contradicts another option too; rules between keys
    cannot see that.
    """
    given = {
        key: at.place for (section, key), at in loading.where.items() if section == "optimizer"
    }
    message = find_contradiction(
        loading.config.optimizer, sorted(given.keys() - set(BUILDER_DEFAULTS))
    )
    if message is None:
        return []
    return [ConfigError("MW-CONFIG-081", f"{given['options']}: {message}")]


def _advise_import(file: KeySource, place: str) -> list[ConfigError]:
    """Return the advice to import a file of another framework, as an error."""
    sections = {given.path[0] for given in file.given if len(given.path) > 1}
    command = f"meshwright config import {place}"
    if len(sections & TORCHTITAN) >= 2:
        return [
            ConfigError(
                "MW-CONFIG-022", f"{place}: a configuration of torchtitan: `{command}` converts it"
            )
        ]
    if (
        file.problems
        and File(place).is_file()
        and File(place).suffix in ("", ".yaml", ".yml", ".txt", ".sh")
    ):
        return [
            ConfigError(
                "MW-CONFIG-023",
                f"{place}: `{command}` reads nanotron's YAML and Megatron-LM's flags",
            )
        ]
    return []
