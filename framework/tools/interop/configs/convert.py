"""Conversion of another framework's file to a :class:`~meshwright.config.RunConfig`, with an account of its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.config import RunConfig, given_keys, load_saved, resolve
from meshwright.config.keys import SECTIONS, split
from meshwright.errors import ConfigError
from meshwright.tools.interop.configs import megatron, nanotron, torchtitan
from meshwright.tools.interop.configs.readers import read_text, read_toml, read_yaml
from meshwright.tools.interop.configs.shell import read_script
from meshwright.tools.interop.configs.torchtitan_keys import MOVED
from meshwright.tools.interop.configs.translation import Draft, DroppedKey, SourceKey

SUFFIXES = {".toml": "torchtitan", ".yaml": "nanotron", ".yml": "nanotron"}
TRANSLATE: dict[str, Callable[[Draft, int | None], None]] = {
    "torchtitan": torchtitan.translate,
    "nanotron": nanotron.translate,
    "megatron": megatron.translate,
}
NAMES = {"torchtitan": "torchtitan", "nanotron": "nanotron", "megatron": "Megatron-LM"}


class ImportedConfig(NamedTuple):
    """Result of an import: the configuration, and an account of the file's keys."""

    config: RunConfig
    framework: str
    """Source framework: ``torchtitan``, ``nanotron`` or ``megatron``."""
    num_keys: int
    """Number of keys in the file."""
    decided: list[str]
    assumed: list[str]
    """Keys missing from the file, with the defaults of their framework."""
    dropped: list[DroppedKey]


def detect_framework(path: Path) -> str:
    """Detect the framework of a file by its suffix: TOML is torchtitan, YAML nanotron, all else Megatron-LM flags.

    Raises:
        ConfigError: a Python file, the form of torchtitan's configurations since 2026.
    """
    if path.suffix == ".py":
        raise ConfigError(
            "MW-INTEROP-001",
            f"{path}: a Python file: torchtitan's config_registry (since February 2026) is code, "
            f"which meshwright does not run; give an older TOML file, or copy its values into a copy of "
            f"configs/llama3-8b.toml",
        )
    return SUFFIXES.get(path.suffix, "megatron")


def convert_file(
    path: Path, framework: str | None = None, overrides: Sequence[str] = (), ranks: int | None = None
) -> ImportedConfig:
    """Import a configuration file of another framework.

    Args:
        path: the file.
        framework: a key of ``TRANSLATE``; None: detected by the suffix.
        overrides: meshwright keys that replace the imported ones, in command-line form.
        ranks: number of ranks of the whole job, if the file does not fix it.

    Raises:
        ConfigError: the file cannot be read, names an unsupported model, or gives an invalid configuration.
    """
    framework = framework or detect_framework(path)
    items = _read(path, framework)
    if not items:
        raise ConfigError("MW-INTEROP-002", f"{path}: contains no key of {NAMES[framework]}")
    given = given_keys(overrides)
    own_model = ("model", "builder") in given
    draft = Draft(items, NAMES[framework], own_model=own_model)
    TRANSLATE[framework](draft, ranks)
    draft.tree.setdefault("run.name", Draft.run_name(path.stem))
    place = f"{path}, read as {NAMES[framework]}'s"
    if own_model:
        draft.tree = {key: value for key, value in draft.tree.items() if not key.startswith("model.")}
    config = load_saved(draft.nested(), overrides, place)
    _check(config, place)
    overridden = {".".join(key) for key in given}
    decided = [line for line in draft.decided if line.partition(" = ")[0] not in overridden]
    return ImportedConfig(config, framework, len(items), decided, draft.assumed, draft.dropped)


def _read(path: Path, framework: str) -> dict[str, SourceKey]:
    text = read_text(path)
    if framework == "torchtitan":
        items = read_toml(path, text)
        sections = {split(key)[0] for key in items}
        if sections <= SECTIONS.keys() and {"run", "batch", "train"} & sections:
            raise ConfigError("MW-INTEROP-003", f"{path}: is already a configuration of meshwright: nothing to import")
        return {MOVED.get(key, key): item for key, item in items.items()}
    if framework == "nanotron":
        items = read_yaml(path, text)
        return {nanotron.canonical(key): item for key, item in items.items()}
    return read_script(path, text)


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
