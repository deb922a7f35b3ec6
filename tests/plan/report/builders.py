"""Run directories as runs leave them, without training: metrics of each step, starts, checkpoints,
a trace.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, resolve, write_snapshot
from meshwright.mesh.grid import Grid
from meshwright.run.directory import PEAKS, Peaks
from meshwright.run.starts import record_start
from meshwright.schedule.analysis import Costs, simulate
from meshwright.schedule.load import draw_schedule, format_schedule
from meshwright.tracking.record import EXPERT_LOAD, StepRecord, to_json
from meshwright.watch.trace import Trace
from meshwright.watch.trace import write as write_trace

Change = Callable[[int], dict[str, Any]]


def config_of(directory: Path, **sections: dict[str, Any]) -> RunConfig:
    """dp 2 x pp 2 x tp 2, resolved; ``directory``: of the run."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": directory.name, "directory": str(directory.parent)},
        "data": {"train": "corpus/train"},
        "batch": {"micro_batch_size": 1, "global_batch": 8},
        "parallel": {"dp": 2, "pp": 2, "tp": 2},
        "train": {"steps": 100},
    }
    for section, keys in sections.items():
        tree.setdefault(section, {}).update(keys)
    config = RunConfig.model_validate(tree)
    assert isinstance(config.parallel.dp, int)
    return resolve(config, config.parallel.dp * config.parallel.pp * config.parallel.tp)


def record(step: int, seed: int = 0, **changes: Any) -> StepRecord:
    """A step of a run that learns, with noise."""
    draw = random.Random(step * 1000 + seed)
    values: dict[str, Any] = {
        "step": step,
        "samples_seen": 8 * step,
        "tokens": 8 * 1024 * step,
        "loss": 4 + 5 * math.exp(-step / 300) + draw.gauss(0, 0.1),
        "grad_norm": 0.5 + abs(draw.gauss(0, 0.2)),
        "learning_rate": 3e-4 * min(1, step / 50),
        "step_s": 0.2 + abs(draw.gauss(0, 0.02)),
        "data_s": 0.001,
        "tokens_per_s": 8 * 1024 / 0.2,
        "num_devices": 8,
        "memory_bytes": 2**30 + step * 1000,
        "bubble_share": 0.2,
        "validation_loss": 4.2 + 5 * math.exp(-step / 300) if step % 25 == 0 else None,
    }
    return StepRecord(**values | changes)


def make_run(
    directory: Path,
    steps: int = 100,
    *,
    starts: Sequence[tuple[int, Grid]] = ((0, Grid(pp=2, dp=2, tp=2)),),
    change: Change = lambda step: {},
    seed: int = 0,
    traced: bool = True,
    saved: Sequence[int] = (),
    **sections: dict[str, Any],
) -> Path:
    """The directory. ``starts``: (from step, grid); a step is of the last start before it."""
    directory.mkdir(parents=True)
    config = config_of(directory, **sections)
    write_snapshot(directory, config)
    for from_step, grid in starts:
        record_start(directory, from_step, grid, ["node0"] * grid.size)
    lines = []
    for step in range(1, steps + 1):
        restarts = sum(from_step < step for from_step, _ in starts) - 1
        lines.append(to_json(record(step, seed, **{"restarts": restarts} | change(step))))
    if lines:
        (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for step in saved:
        make_checkpoint(directory, step, config)
    if traced:
        make_trace(directory, config, min(5, steps))
    if steps:
        make_peaks(directory, steps, starts[-1][1] if starts else Grid(pp=2, dp=2, tp=2))
    return directory


def make_mixture_run(directory: Path, steps: int = 60, num_experts: int = 40) -> Path:
    """A run of a mixture of experts on ep 4, with metrics and loads of four layers."""
    draw = random.Random(7)
    metrics = ("skew", "entropy", "idle_share", "token_entropy", "dropped_share")
    run = make_run(
        directory,
        steps,
        change=lambda step: {"extra": {f"experts/{name}": draw.random() for name in metrics}},
        parallel={"ep": 4},
    )
    loads = [
        {
            "step": step,
            "counts": {
                f"block{i}.mlp.router": [draw.randrange(99) for _ in range(num_experts)]
                for i in range(4)
            },
        }
        for step in range(1, steps + 1)
    ]
    (run / EXPERT_LOAD).write_text("".join(f"{json.dumps(load)}\n" for load in loads))
    return run


def make_peaks(run: Path, step: int, grid: Grid) -> None:
    """Of each rank, a tenth of a GiB more from stage to stage."""
    peaks = tuple(
        2**30 + grid.coordinates(rank).pp_rank * 2**30 // 10 + rank for rank in range(grid.size)
    )
    found = Peaks(step=step, device="cpu", grid=grid.degrees, peaks=peaks)
    (run / PEAKS).write_text(found.model_dump_json())


def make_checkpoint(run: Path, step: int, config: RunConfig, saved_at_s: object = None) -> None:
    """Its manifest and an empty file: nobody reads more of it here. ``saved_at_s`` None:
    of an earlier version.
    """
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    tensors = {
        "weights/a": {"shape": [100, 20]},
        "weights/b": {"shape": [7]},
        "exp_avg/a": {"shape": [100, 20]},
    }
    manifest = {
        "step": step,
        "samples_seen": 8 * step,
        **({} if saved_at_s is None else {"saved_at_s": saved_at_s}),
        "config": config.model_dump(mode="json"),
        "files": {"pp0-tp0-00000.safetensors": {"size": 3 * 2**20}},
        "tensors": tensors,
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "pp0-tp0-00000.safetensors").touch()


def make_trace(run: Path, config: RunConfig, step: int) -> None:
    """Of the configuration's schedule, as if each action had taken what the simulator says,
    in ms.
    """
    schedule = draw_schedule(config.pipeline, config.parallel.pp, config.batch.chunks)
    timeline = simulate(schedule, Costs(f=0.01, b=0.02, comm=0.002, step=0.003))
    write_trace(
        Trace(
            run=config.run.name,
            step=step,
            torch="2",
            device="cpu",
            hosts=("node0",) * config.parallel.pp,
            clock_error_s=0.0,
            schedule=format_schedule(schedule),
            spans=tuple(
                (span.rank, str(span.action), span.start, span.end) for span in timeline.spans
            ),
            data=((0, 0.0, 0.001),),
        ),
        run / "traces" / f"step-{step:08d}.json",
    )
