"""TOML writer for a RunConfig: the standard library reads TOML and does not write it."""

from __future__ import annotations

import json
import re
from typing import Any

from meshwright.config.schema import RunConfig


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # TOML's basic strings are JSON's, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_name(name)} = {_value(part)}" for name, part in value.items()) + "}"
    assert isinstance(value, list | tuple), value
    return "[" + ", ".join(_value(part) for part in value) + "]"


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _is_table(value: Any) -> bool:
    """Return True for a table whose keys each get a line. An empty table needs no heading."""
    return isinstance(value, dict) and bool(value)


def to_toml(config: RunConfig, *, defaults: bool = False) -> str:
    """Return TOML text that :func:`~meshwright.config.load` reads back as ``config``.

    ``defaults``: include keys at their default. Unset keys (None) have no form in TOML and are left out.
    """
    parts: list[str] = []
    for section, table in config.model_dump(exclude_defaults=not defaults, exclude_none=True).items():
        rows = [f"{name} = {_value(value)}" for name, value in table.items() if not _is_table(value)]
        tables = {f"{section}.{name}": value for name, value in table.items() if _is_table(value)}
        if rows:
            parts.append("\n".join([f"[{section}]", *rows]) + "\n")
        for name, inner in tables.items():
            parts.append(
                "\n".join([f"[{name}]", *(f"{_name(key)} = {_value(value)}" for key, value in inner.items())]) + "\n"
            )
    return "\n".join(parts)
