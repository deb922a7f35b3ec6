"""Reading of foreign TOML, JSON and YAML files as flat items with line numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.config.keys import flatten
from meshwright.config.sources import toml_lines
from meshwright.errors import ConfigError
from meshwright.system.bounded import (
    MIB,
    parse_toml,
    read_bytes,
)
from meshwright_interop.configs.bounded_yaml import parse_yaml
from meshwright_interop.configs.source_keys import SourceKey


def read_text(path: Path) -> str:
    """Read a text file of at most 1 MiB.

    Raises:
        ConfigError: the file is missing, a directory, unreadable, or not UTF-8 text.
    """
    try:
        return read_bytes(path, MIB).decode()
    except FileNotFoundError:
        raise ConfigError(
            "MW-INTEROP-011", f"{path}: no such file: give the path of the configuration"
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            "MW-INTEROP-012", f"{path}: is a directory; give one file in it"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            "MW-INTEROP-013", f"{path}: not UTF-8 text (byte {error.start}): give a text file"
        ) from None
    except OSError as error:
        raise ConfigError(
            "MW-INTEROP-014", f"{path}: cannot be read: {error.strerror or error}"
        ) from None


def read_document(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse TOML, or YAML, of which JSON is a part; return the document,
    and the line number of each dotted key.

    Raises:
        ConfigError: a syntax error, with its line; or the document is no mapping.
    """
    if path.suffix == ".toml":
        return _parse_toml(path, text)
    return _parse_yaml(path, text)


def items_of(
    path: Path, document: Mapping[str, Any], lines: Mapping[str, int]
) -> dict[str, SourceKey]:
    """Flatten a document: dotted key -> item."""
    return {
        key: SourceKey(key, value, _place(path, lines.get(key)))
        for key, value in flatten(dict(document))
    }


def _parse_toml(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        return parse_toml(text), toml_lines(text)
    except ValueError as error:
        raise ConfigError(
            "MW-INTEROP-015", f"{path}: not valid TOML: {error}; correct the file"
        ) from None


def _place(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}:{line}"


def _parse_yaml(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse YAML. Tags are ignored, so that a file cannot run code."""
    import yaml

    try:
        document, root = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            "MW-INTEROP-016",
            f"{_place(path, mark and mark.line + 1)}: not valid YAML: {problem}; correct the file",
        ) from None
    except ValueError as error:
        raise ConfigError("MW-INTEROP-017", f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(
            "MW-INTEROP-018",
            f"{path}: a configuration is a mapping of sections, and this is not: give another file",
        )
    try:
        lines = dict(_yaml_lines(root))
        list(flatten(document))
    except RecursionError:
        raise ConfigError("MW-INTEROP-019", f"{path}: an alias in it contains itself") from None
    return document, lines


def _yaml_lines(node: Any, above: str = "") -> Iterator[tuple[str, int]]:
    import yaml

    for name, value in node.value:
        key = f"{above}{name.value}"
        yield key, name.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _yaml_lines(value, f"{key}.")
