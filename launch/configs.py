"""Command ``meshwright config``: import of other frameworks' configurations, and display of resolved ones. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, default_world_size, load_with_origins, resolve
from meshwright.config.keys import toml_value
from meshwright.config.sources import toml_lines
from meshwright.errors import ConfigError, UserError
from meshwright.schedule.load import draw_schedule
from meshwright.system.atomic import write_out
from meshwright.system.bounded import MAX_TOML_BYTES, read_text
from meshwright.terminal.output import put, tell
from meshwright.tools.interop.configs import convert_file, file_text, format_report

MOST_ACTIONS = 4096
"""Micro-batches x pipeline ranks up to which an import also builds the schedule (one second)."""


def import_config(
    path: Path, framework: str | None, overrides: Sequence[str], ranks: int | None, out: Path | None, *, replace: bool
) -> None:
    """Convert a configuration of another framework, with an account of every key.

    The file goes to ``out`` and the account to stdout. Without ``out`` the file goes to stdout, the account to stderr.

    Raises:
        UserError: the file cannot be read, or its values do not fit together here.
    """
    if out is not None and out.exists() and not replace:
        raise ConfigError("MW-LAUNCH-007", f"--out {out} is there already: name another file, or add --replace")
    adopted = convert_file(path, framework, overrides, ranks)
    _check_schedule(adopted.config, path)
    text = file_text(adopted, path.name)
    if out is None:
        put(text, end="")
        tell(format_report(adopted))
        return
    write_out(out, text)
    put(f"{format_report(adopted)}\n\nwritten: {out}; next: `meshwright stages {out}`, `meshwright dryrun {out}`")


def _check_schedule(config: RunConfig, path: Path) -> None:
    resolved = resolve(config, default_world_size(config, 0))
    assert resolved.batch.chunks is not None
    if resolved.batch.chunks * resolved.parallel.pp > MOST_ACTIONS:
        return
    try:
        draw_schedule(resolved)
    except UserError as error:
        raise ConfigError("MW-LAUNCH-008", f"{path}: what it says cannot be run here: {error.message}") from None


def show(path: str, overrides: Sequence[str], ranks: int | None, *, everything: bool) -> str:
    """Return the configuration as TOML, resolved for ``ranks`` ranks, with the origin of each value.

    Raises:
        ConfigError: the values do not fit together.
    """
    config, places = load_with_origins(path, overrides)
    lines_of = toml_lines(read_text(path, MAX_TOML_BYTES))

    def origin(*key: str) -> str:
        """Return the origin of a key, or of the table in which the key was given."""
        place = places.get(key) or places.get(key[:2]) or "default"
        line = lines_of.get(".".join(key)) or lines_of.get(".".join(key[:2]))
        return f"{path}:{line}" if place == path and line else place

    resolved = resolve(config, ranks or default_world_size(config, 0))
    as_given = config.model_dump()
    lines: list[str] = []
    for section, table in resolved.model_dump().items():
        before = as_given[section]
        rows = [
            (f"{name} = {toml_value(value)}", said)
            for name, value, said in _rows(section, table, before, origin)
            if everything or said != "default"
        ]
        width = max((len(text) for text, _ in rows), default=0)
        lines += (
            [f"[{section}]", *(f"{text:<{min(width, 60)}}  # {origin}" for text, origin in rows), ""] if rows else []
        )
    return "\n".join(lines).rstrip()


def _rows(
    section: str, table: dict[str, Any], before: dict[str, Any], origin: Callable[..., str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (key below the section, value, origin) of every value that is set; tables are split into their keys."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from ((f"{name}.{key}", inner, origin(section, name, key)) for key, inner in value.items())
        elif value is not None:
            derived = value != before[name]
            yield name, value, "follows from the others" if derived else origin(section, name)
