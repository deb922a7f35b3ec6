"""Reading of foreign TOML and YAML files as flat items with line numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.config.sources import toml_lines
from meshwright.errors import ConfigError
from meshwright.system.bounded import MIB, parse_toml, parse_yaml, read_bytes
from meshwright.tools.interop.configs.translation import SourceKey


def read_text(path: Path) -> str:
    """Read a text file of at most 1 MiB.

    Raises:
        ConfigError: the file is missing, a directory, unreadable, or not UTF-8 text.
    """
    try:
        return read_bytes(path, MIB).decode()
    except FileNotFoundError:
        raise ConfigError("MW-INTEROP-011", f"{path}: no such file: give the path of the configuration") from None
    except IsADirectoryError:
        raise ConfigError("MW-INTEROP-012", f"{path}: is a directory; give one file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError("MW-INTEROP-013", f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError("MW-INTEROP-014", f"{path}: cannot be read: {error.strerror or error}") from None


def flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested tables: ``{"a": {"b": 1}}`` -> ("a.b", 1). An empty table counts as a value."""
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def read_toml(path: Path, text: str) -> dict[str, SourceKey]:
    """Parse TOML: dotted key -> item.

    Raises:
        ConfigError: not TOML, with the line.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise ConfigError("MW-INTEROP-015", f"{path}: not valid TOML: {error}") from None
    lines = toml_lines(text)
    return {key: SourceKey(key, value, _place(path, lines.get(key))) for key, value in flat(document)}


def _place(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}:{line}"


def read_yaml(path: Path, text: str) -> dict[str, SourceKey]:
    """Parse YAML: dotted key -> item. Tags are ignored, so that a file cannot run code.

    Raises:
        ConfigError: not YAML, or no mapping, with the line.
    """
    import yaml

    try:
        document, root = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            "MW-INTEROP-016", f"{_place(path, mark and mark.line + 1)}: not valid YAML: {problem}"
        ) from None
    except ValueError as error:
        raise ConfigError("MW-INTEROP-017", f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError("MW-INTEROP-018", f"{path}: not a mapping of sections, which a nanotron file is")
    try:
        lines = dict(_yaml_lines(root))
        return {key: SourceKey(key, value, _place(path, lines.get(key))) for key, value in flat(document)}
    except RecursionError:
        raise ConfigError("MW-INTEROP-019", f"{path}: an alias in it contains itself") from None


def _yaml_lines(node: Any, above: str = "") -> Iterator[tuple[str, int]]:
    import yaml

    for name, value in node.value:
        key = f"{above}{name.value}"
        yield key, name.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _yaml_lines(value, f"{key}.")
