"""Construction of the tracker from the configuration."""

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
    """Build the tracker of one process. Only the one with ``is_writer`` (rank 0) writes; the others have no sinks.

    Call it after loading a checkpoint, because it drops the records after ``resumed_step``.

    Args:
        run_directory: Directory of the run.
        is_writer: True on the rank that writes.
        name: Name of the run in wandb.
        config: Configuration that wandb shows, JSON-able.
        total_steps: Last step of the run.
        resumed_step: Step of the loaded checkpoint. Later records in ``metrics.jsonl`` are dropped.
        log_every: Steps between console lines.
        console: Show progress on the console.
        unit: Unit of the inputs, for the console.
        wandb: Mode of wandb.
        project: Project in wandb.
        warn: Receives warnings.
        is_ours: Returns True while the directory still belongs to this run.
    """
    if not is_writer:
        return Tracker(warn=warn)
    sinks: list[Sink] = []
    if console:
        sinks.append(ConsoleSink(total_steps, log_every, unit=unit))
    if wandb is not WandbMode.OFF:
        sinks.append(WandbSink(run_directory, project=project, name=name, config=config, mode=wandb, warn=warn))
    return Tracker(JsonlSink(run_directory / METRICS_FILE, resumed_step, is_ours), sinks, warn=warn)
