"""Configuration files of a run directory: ``resolved.json`` for programs, ``config.toml`` for people."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.load import dump
from meshwright.config.schema import RunConfig
from meshwright.config.toml import to_toml
from meshwright.system.durable import replace_synced


def write_snapshot(directory: Path, config: RunConfig) -> None:
    """Write both files atomically and flush them to disk. ``config``: resolved."""
    for name, text in (("resolved.json", dump(config)), ("config.toml", to_toml(config))):
        replace_synced(directory / name, text.encode())
