"""Configuration files of a run directory: ``resolved.json`` for programs,
``config.toml`` for people.
"""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.config.keys import format_value, null_problem, toml_name, toml_value
from meshwright.config.loading import KEY_CHECKS, Loading, run_checks
from meshwright.config.schema import RunConfig
from meshwright.config.sources import leaves
from meshwright.errors import ConfigError
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import MIB, check_values, parse_json, read_text

FORMAT = 1
"""Version of the format of ``resolved.json``; files without one have it too. It rises when an older
reader could misinterpret a newer file.
"""


def parse(text: str, place: str = "resolved configuration") -> RunConfig:
    """Parse the configuration that :func:`dump` wrote. ``place`` names the text in errors.

    Checks each key by itself, not the rules between keys: a configuration made in code may break
    them.
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
            f"{place}: {format_value(document)} is not a configuration: a JSON object of sections"
            " is needed",
        )
    written = document.pop("format", FORMAT)
    if written != FORMAT:
        raise ConfigError(
            "MW-CONFIG-082",
            f"{place}: format = {format_value(written)}, this meshwright reads {FORMAT}: use the"
            " meshwright that wrote it, or its config.toml",
        )
    return run_checks(Loading(list(leaves(document, place)), place), KEY_CHECKS)


def read_resolved(path: Path) -> RunConfig:
    """Return the configuration in a run's ``resolved.json``.

    Raises:
        ConfigError: The file cannot be read, or :func:`parse` refuses its text.
    """
    try:
        return parse(read_text(path, MIB), str(path))
    except OSError as error:
        raise ConfigError(
            "MW-CONFIG-026", f"{path}: cannot be read ({error.strerror or error})"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            "MW-CONFIG-027",
            f"{path}: not UTF-8 (byte {error.start}); write it again from its TOML file",
        ) from None


def dump(config: RunConfig) -> str:
    """Return the JSON for ``resolved.json``: every key, defaults included.
    :func:`parse` returns an equal object.
    """
    return json.dumps({"format": FORMAT, **config.model_dump()}, indent=2, allow_nan=False) + "\n"


def write_snapshot(directory: Path, config: RunConfig) -> None:
    """Write both files atomically and flush them to disk. ``config``: resolved."""
    for name, text in (("resolved.json", dump(config)), ("config.toml", to_toml(config))):
        write_atomic(directory / name, text)


def to_toml(config: RunConfig) -> str:
    """Return TOML text that :func:`~meshwright.config.load` reads back as ``config``.

    Keys at their default are left out, and so are unset keys (None), which TOML cannot write.

    Raises:
        ConfigError: An option contains a None inside a list.
    """
    if (problem := null_problem((), config.model_dump(), "configuration")) is not None:
        raise problem
    parts: list[str] = []
    for section, table in config.model_dump(exclude_defaults=True, exclude_none=True).items():
        inner = {
            f"{section}.{name}": value
            for name, value in table.items()
            if value and isinstance(value, dict)
        }
        own = {name: value for name, value in table.items() if f"{section}.{name}" not in inner}
        for heading, rows in {section: own, **inner}.items():
            lines = [
                f"{toml_name(name)} = {toml_value(value)}"
                for name, value in rows.items()
                if value is not None
            ]
            parts += ["\n".join([f"[{heading}]", *lines, ""])] if lines else []
    return "\n".join(parts)
