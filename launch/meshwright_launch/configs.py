"""Command ``meshwright config show``: a resolved configuration with the origin of each value.
No torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.config import load_with_origins, resolve
from meshwright.config.keys import toml_value
from meshwright.config.sources import toml_lines
from meshwright.system.bounded import MAX_TOML_BYTES, read_text
from meshwright.terminal.output import put


def show(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the configuration as TOML, resolved for ``--ranks`` ranks,
    with the origin of each value.

    Raises:
        ConfigError: the values do not fit together.
    """
    path = options.config
    config, places = load_with_origins(path, overrides)
    lines_of = toml_lines(read_text(path, MAX_TOML_BYTES))

    def origin(*key: str) -> str:
        """Return the origin of a key, or of the table in which the key was given."""
        place = places.get(key) or places.get(key[:2]) or "default"
        line = lines_of.get(".".join(key)) or lines_of.get(".".join(key[:2]))
        return f"{path}:{line}" if place == path and line else place

    loaded = config.model_dump()
    lines: list[str] = []
    for section, table in resolve(config, options.ranks).model_dump().items():
        rows = [
            (f"{name} = {toml_value(value)}", source)
            for name, value, source in _rows(section, table, loaded[section], origin)
            if options.all or source != "default"
        ]
        if rows:
            width = min(max(len(text) for text, _ in rows), 60)
            lines += [
                f"[{section}]",
                *(f"{text:<{width}}  # {source}" for text, source in rows),
                "",
            ]
    put("\n".join(lines).rstrip())
    return 0


def _rows(
    section: str, table: dict[str, Any], loaded: dict[str, Any], origin: Callable[..., str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (key below the section, value, origin) of every value that is set;
    tables are split into their keys.

    ``table``, ``loaded``: the section after and before the configuration was resolved.
    """
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from (
                (f"{name}.{key}", inner, origin(section, name, key)) for key, inner in value.items()
            )
        elif value is not None:
            derived = value != loaded[name]
            yield name, value, "follows from the others" if derived else origin(section, name)
