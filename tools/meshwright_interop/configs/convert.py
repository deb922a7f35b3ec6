"""Conversion of another framework's file to a :class:`~meshwright.config.RunConfig`,
with a report on every key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.config import RunConfig, given_keys, load_saved, resolve
from meshwright.config.keys import SECTIONS
from meshwright.errors import ConfigError
from meshwright_interop.configs import bridge, megatron, nanotron, torchtitan
from meshwright_interop.configs.flags import read_flags
from meshwright_interop.configs.readers import items_of, read_document, read_text
from meshwright_interop.configs.recognise import (
    OWN,
    SUPPORTED,
    check_flags,
    recognise,
    unknown_format,
)
from meshwright_interop.configs.source_keys import DroppedKey, SourceKey
from meshwright_interop.configs.torchtitan_keys import MOVED
from meshwright_interop.configs.translation import Translation

DOCUMENTS = (".toml", ".json", ".yaml", ".yml")
"""Suffixes of files with sections; all others are read as flags."""
TRANSLATE: dict[str, Callable[[Translation, int | None], None]] = {
    "torchtitan": torchtitan.translate,
    "nanotron": nanotron.translate,
    "megatron": megatron.translate,
    "bridge": bridge.translate,
}
NAMES = {
    "torchtitan": "torchtitan",
    "nanotron": "nanotron",
    "megatron": "Megatron-LM",
    "bridge": "Megatron-Bridge",
}


class ImportedConfig(NamedTuple):
    """Result of an import: the configuration, and the fate of each key of the file."""

    config: RunConfig
    """The configuration, with stand-ins for the keys in ``open``."""
    framework: str
    """Source framework, a key of ``NAMES``."""
    num_keys: int
    """Number of keys in the file."""
    decided: list[str]
    assumed: list[str]
    """Keys missing from the file, with the defaults of their framework."""
    dropped: list[DroppedKey]
    open: dict[str, str]
    """Dotted meshwright key that the file does not give, and that has to be set -> the reason."""


def convert_file(
    path: Path,
    framework: str | None = None,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    without: Collection[str] = (),
) -> ImportedConfig:
    """Import a configuration file of another framework.

    Args:
        path: the file.
        framework: a key of ``TRANSLATE``; None: detected by suffix and content.
        overrides: meshwright keys that replace the imported ones, in command-line form.
        ranks: number of ranks of the whole job, if the file does not fix it.
        without: keys of the file that would be refused, and are left out instead.

    Raises:
        ConfigError: the file cannot be read, names an unsupported model or option, or gives an
            invalid configuration.
    """
    framework, items = _read(path, framework)
    if not items:
        raise ConfigError(
            "MW-INTEROP-002",
            f"{path}: contains no key of {NAMES[framework]}: give another file; {SUPPORTED}",
        )
    given = given_keys(overrides)
    translation = Translation(
        items, NAMES[framework], own_model=("model", "builder") in given, without=without
    )
    _translate(translation, TRANSLATE[framework], ranks)
    translation.tree.setdefault("run.name", Translation.run_name(path.stem))
    place = f"{path}, read as {NAMES[framework]}'s"
    overridden = {".".join(key) for key in given}
    if translation.own_model:
        translation.tree = {
            key: value for key, value in translation.tree.items() if not key.startswith("model.")
        }
        overridden |= {key for key in translation.open if key.startswith("model.")}
    config = load_saved(translation.nested(), overrides, place)
    _check(config, place)
    missing = {key: why for key, why in translation.open.items() if key not in overridden}
    replaced = overridden | translation.open.keys()
    decided = [line for line in translation.decided if line.partition(" = ")[0] not in replaced]
    assumed, dropped = translation.assumed, translation.dropped
    return ImportedConfig(config, framework, len(items), decided, assumed, dropped, missing)


def _translate(
    translation: Translation,
    translate: Callable[[Translation, int | None], None],
    ranks: int | None,
) -> None:
    """Translate a file.

    Raises:
        ConfigError: lists all refused keys, and the first value that could not be translated.
    """
    problems: list[ConfigError] = []
    try:
        translate(translation, ranks)
    except ConfigError as error:
        problems = list(error.problems)
    except (OverflowError, ValueError, ZeroDivisionError) as error:
        problems = [ConfigError("MW-INTEROP-139", f"a number in the file is out of range: {error}")]
    refused = [*translation.refused, *problems]
    if refused:
        raise ConfigError.join(refused)


def _read(path: Path, framework: str | None) -> tuple[str, dict[str, SourceKey]]:
    """Read a file and return its framework and items. ``framework``: the user's choice; None:
    detected.

    Raises:
        ConfigError: the file cannot be read, or belongs to a program without an import.
    """
    if path.suffix == ".py":
        raise ConfigError(
            "MW-INTEROP-001",
            f"{path}: a Python file: a configuration in Python, such as torchtitan's"
            " config_registry (since February 2026), is code, which meshwright does not run: write"
            f" its values in the keys of torchtitan's TOML, and import that; or {OWN}",
        )
    text = read_text(path)
    if path.suffix not in DOCUMENTS and framework in (None, "megatron"):
        items = read_flags(path, text)
        if framework is None:
            check_flags(path, items)
        return "megatron", items
    document, lines = read_document(path, text)
    framework = _framework_of(path, document, framework)
    items = items_of(path, document, lines)
    if framework == "megatron":
        return framework, megatron.functional_test_items(items)
    if framework == "bridge":
        return framework, bridge.as_flags(items)
    if framework == "nanotron":
        return framework, {nanotron.canonical(key): item for key, item in items.items()}
    return framework, {MOVED.get(key, key): item for key, item in items.items()}


def _framework_of(path: Path, document: Mapping[str, Any], given: str | None) -> str:
    """Return the framework of a document; ``given``: the user's choice, for keys that show none.

    Raises:
        ConfigError: a file of meshwright, of another framework than ``given``, or of none that is
            read.
    """
    if (
        path.suffix == ".toml"
        and document.keys() <= SECTIONS.keys()
        and {"run", "batch", "train"} & document.keys()
    ):
        raise ConfigError(
            "MW-INTEROP-003", f"{path}: is already a configuration of meshwright: nothing to import"
        )
    if not document:
        raise ConfigError(
            "MW-INTEROP-144", f"{path}: contains no key: give another file; {SUPPORTED}"
        )
    found = recognise(document) or given
    if found is None:
        raise unknown_format(path, document)
    if given not in (None, found):
        raise ConfigError(
            "MW-INTEROP-094",
            f"{path}: a file of {NAMES[found]}, not of {NAMES[given]}: leave --from out",
        )
    return found


def _check(config: RunConfig, place: str) -> None:
    """Check that the configuration resolves, and that its schedule can be built.

    Raises:
        ConfigError: it does not; overriding a key can help.
    """
    try:
        resolve(config)
    except ConfigError as error:
        raise ConfigError.join(
            [ConfigError(each.code, f"{place}: {each.message}") for each in error.problems]
        ) from None
