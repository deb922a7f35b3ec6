"""Command ``meshwright config``: import of other frameworks' configurations, and display of resolved ones. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, load_with_origins, resolve
from meshwright.config.keys import toml_value
from meshwright.config.sources import toml_lines
from meshwright.errors import ConfigError, UserError
from meshwright.schedule.load import draw_schedule
from meshwright.system.atomic import write_out
from meshwright.system.bounded import MAX_TOML_BYTES, read_text
from meshwright.terminal.output import put, tell
from meshwright.tools.interop.configs import convert_file, file_text, format_report

MAX_ACTIONS = 4096
"""Micro-batches x pipeline ranks up to which an import also builds the schedule (one second)."""


def import_config(options: argparse.Namespace, overrides: list[str]) -> int:
    """Convert a configuration of another framework, with a report on every key.

    The file goes to ``--out`` and the report to stdout. Without it the file goes to stdout, the report to stderr.

    Raises:
        UserError: the file cannot be read, or its values do not fit together here.
    """
    path, out = options.file, options.out
    if out is not None and out.exists() and not options.replace:
        raise ConfigError("MW-LAUNCH-007", f"--out {out} exists: name another file, or add --replace")
    without = {key.lstrip("-") for key in options.without}
    converted = convert_file(path, getattr(options, "from"), overrides, options.ranks, without)
    if not any(key.startswith(("parallel.", "batch.", "pipeline.")) for key in converted.open):
        _check_schedule(converted.config, path)
    text, report = file_text(converted, path.name), format_report(converted)
    if out is None:
        put(text, end="")
        tell(report)
    else:
        write_out(out, text)
        after = f"set {', '.join(converted.open)} in it, then " if converted.open else ""
        put(f"{report}\n\nwritten: {out}; next: {after}`meshwright stages {out}`, `meshwright dryrun {out}`")
    return 0


def _check_schedule(config: RunConfig, path: Path) -> None:
    resolved = resolve(config)
    assert resolved.batch.chunks is not None
    if resolved.batch.chunks * resolved.parallel.pp > MAX_ACTIONS:
        return
    try:
        draw_schedule(resolved)
    except UserError as error:
        raise ConfigError("MW-LAUNCH-008", f"{path}: this configuration cannot be run here: {error.message}") from None


def show(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the configuration as TOML, resolved for ``--ranks`` ranks, with the origin of each value.

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
            lines += [f"[{section}]", *(f"{text:<{width}}  # {source}" for text, source in rows), ""]
    put("\n".join(lines).rstrip())
    return 0


def _rows(
    section: str, table: dict[str, Any], loaded: dict[str, Any], origin: Callable[..., str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (key below the section, value, origin) of every value that is set; tables are split into their keys.

    ``table``, ``loaded``: the section after and before the configuration was resolved.
    """
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from ((f"{name}.{key}", inner, origin(section, name, key)) for key, inner in value.items())
        elif value is not None:
            derived = value != loaded[name]
            yield name, value, "follows from the others" if derived else origin(section, name)
