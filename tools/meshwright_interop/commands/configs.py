"""Command ``meshwright config import``: configurations of other frameworks. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.config import RunConfig, resolve
from meshwright.errors import ConfigError, UserError
from meshwright.schedule.load import draw_schedule
from meshwright.system.atomic import write_out
from meshwright.terminal.output import put, tell
from meshwright_interop.configs import convert_file, file_text, format_report

MAX_ACTIONS = 4096
"""Micro-batches x pipeline ranks up to which an import also builds the schedule (one second)."""


def import_config(options: argparse.Namespace, overrides: list[str]) -> int:
    """Convert a configuration of another framework, with a report on every key.

    The file goes to ``--out`` and the report to stdout. Without it the file goes to stdout, the
    report to stderr.

    Raises:
        UserError: the file cannot be read, or its values do not fit together here.
    """
    path, out = options.file, options.out
    if out is not None and out.exists() and not options.replace:
        raise ConfigError(
            "MW-LAUNCH-007", f"--out {out} exists: name another file, or add --replace"
        )
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
        put(
            f"{report}\n\nwritten: {out}; next: {after}`meshwright stages {out}`, `meshwright"
            f" dryrun {out}`"
        )
    return 0


def _check_schedule(config: RunConfig, path: Path) -> None:
    resolved = resolve(config)
    assert resolved.batch.chunks is not None
    if resolved.batch.chunks * resolved.parallel.pp > MAX_ACTIONS:
        return
    try:
        draw_schedule(resolved.pipeline, resolved.parallel.pp, resolved.batch.chunks)
    except UserError as error:
        raise ConfigError(
            "MW-LAUNCH-008", f"{path}: this configuration cannot be run here: {error.message}"
        ) from None
