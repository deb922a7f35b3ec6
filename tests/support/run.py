"""Runs of one rank that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.verify.rank import RankFindings, run_layout

Break = Callable[[pytest.MonkeyPatch], None]
"""Function at the top of a module that puts one fault into the code."""


def nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave the code as it is: the control of a test with faults."""


def run_broken(
    rank: int,
    world_size: int,
    break_code: Break,
    config_json: str,
    steps: int = 1,
    random_tokens: bool = True,
    *options: Any,
) -> RankFindings:
    """Run one rank of a layout, as ``run_layout`` does, with one fault in the code."""
    with pytest.MonkeyPatch.context() as patch:
        break_code(patch)
        return run_layout(rank, world_size, config_json, steps, random_tokens, *options)


def alive(pid: int) -> bool:
    """Return whether the process runs: one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
