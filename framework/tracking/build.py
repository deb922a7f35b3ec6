"""From what the configuration says to a tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.tracking.console import ConsoleSink
from meshwright.tracking.jsonl import JsonlSink
from meshwright.tracking.sink import Sink
from meshwright.tracking.tracker import Tracker, warn_on_stderr
from meshwright.tracking.wandb import WandbMode, WandbSink

METRICS_FILE = "metrics.jsonl"


def build_tracker(
    run_directory: Path,
    *,
    is_writer: bool,
    name: str,
    config: Mapping[str, Any],
    total_steps: int,
    resumed_step: int = 0,
    log_every: int = 1,
    console: bool = True,
    unit: str = "tokens",
    wandb: WandbMode = WandbMode.OFF,
    project: str = "meshwright",
    warn: Callable[[str], None] = warn_on_stderr,
    is_ours: Callable[[], bool] = lambda: True,
) -> Tracker:
    """The tracker of one process. Only the one with ``is_writer`` (rank 0) tells anything; the others' does nothing.

    ``config`` is what wandb shows as the run's configuration, JSON-able. ``resumed_step``: the step of the checkpoint
    that was loaded; what ``metrics.jsonl`` holds beyond it is dropped. Build it after loading, therefore.
    ``unit``: of what goes in. ``is_ours``: whether the directory is still this run's.
    """
    if not is_writer:
        return Tracker(warn=warn)
    sinks: list[Sink] = []
    if console:
        sinks.append(ConsoleSink(total_steps, log_every, unit=unit))
    if wandb is not WandbMode.OFF:
        sinks.append(WandbSink(run_directory, project=project, name=name, config=config, mode=wandb, warn=warn))
    return Tracker(JsonlSink(run_directory / METRICS_FILE, resumed_step, is_ours), sinks, warn=warn)
