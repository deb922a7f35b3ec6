"""Check of the time model on this machine: rates are measured first,
then a dozen layouts predicted and run.

    python benchmarks/planner_on_cpu.py [--steps 4] [--repeats 3] [--out FILE]

    calibrate   as `meshwright calibrate` does, with all cores busy
    predict     the step of each layout, from the rates alone
    measure     the fastest step of each, layouts in turns

The fastest, because other work on the machine only slows a step. Printed are each ratio and
Spearman's rank correlation between the predicted and the measured order. Exit code 1: it is under
0.9. Ranks share the cores of the machine: ranks that run at once slow each other down by as much.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import conclude, environment
from rich.console import Console
from rich.table import Table
from task import Samples, run_config

import meshwright.tensor_parallel.megatron
import meshwright_models.gpt2
from meshwright.build import build
from meshwright.config import RunConfig
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright_launch.pool import RankPool
from meshwright_plan.commands.calibration import (
    measure_all_links,
    measure_block_share,
    measure_core,
)
from meshwright_plan.planner.calibrate import build_hardware, cores
from meshwright_plan.planner.choice import choice_of
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import evaluate

TIMEOUT_S = 1200.0
LEAST_CORRELATION = 0.9
GLOBAL_BATCH = 16
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 1},
    {"dp": 1, "recompute": "full"},
    {"dp": 1, "micro": 2},
    {"dp": 2},
    {"dp": 2, "zero": 3},
    {"dp": 4, "micro": 2},
    {"dp": 4, "zero": 3, "micro": 2},
    {"pp": 2},
    {"pp": 2, "recompute": "full"},
    {"pp": 4, "schedule": "gpipe"},
    {"pp": 2, "schedule": "zb_h1"},
    {"tp": 2},
    {"tp": 2, "sequence": True},
    {"tp": 4, "micro": 2},
    {"tp": 8, "micro": 1},
    {"dp": 2, "pp": 2, "tp": 2},
]


def config_of(layout: dict[str, Any]) -> RunConfig:
    """Return the task of all benchmarks with the same samples in each step, in this layout."""
    dp, micro = layout.get("dp", 1), layout.get("micro", 4)
    config = run_config(dp, layout.get("pp", 1), layout.get("tp", 1), zero=layout.get("zero", 1))
    batch = {
        "micro_batch_size": micro,
        "chunks": GLOBAL_BATCH // micro // dp,
        "global_batch": GLOBAL_BATCH,
    }
    pipeline = {
        "schedule": layout.get("schedule", "1f1b"),
        "recompute": layout.get("recompute", "none"),
    }
    return config.model_copy(
        update={
            "batch": config.batch.model_copy(update=batch),
            "pipeline": config.pipeline.model_copy(update=pipeline),
            "parallel": config.parallel.model_copy(
                update={"sequence": layout.get("sequence", False)}
            ),
        }
    )


def measure(rank: int, world_size: int, config: RunConfig, steps: int) -> list[float]:
    """Return the seconds of each step after one that warms up."""
    mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu")
    parts = build(config, mesh, (Samples(), {}))
    found = []
    for _ in range(steps + 1):
        mesh.world.barrier()
        start = time.perf_counter()
        take_step(parts)
        for replica in parts.replicas.values():
            replica.wait_for_weights()
        mesh.world.barrier()
        found.append(time.perf_counter() - start)
    return found[1:]


def calibrated(pool: RankPool) -> Hardware:
    """Calibrate this machine, as `meshwright calibrate` does."""
    alone = pool.run(measure_core, min(cores(), 8), timeout_s=TIMEOUT_S)
    links = pool.run(measure_all_links, max(2, min(cores(), 8)), timeout_s=TIMEOUT_S)[0]
    found = build_hardware(
        alone, links, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 8
    )
    shares = pool.run(measure_block_share, min(cores(), 8), found, timeout_s=TIMEOUT_S)
    return found.model_copy(update={"whole_share": statistics.median(shares)})


def correlation(a: list[float], b: list[float]) -> float:
    """Return Spearman's rank correlation of two lists without equal numbers."""
    ranks = [[sorted(each).index(number) for number in each] for each in (a, b)]
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(*ranks, strict=True)) / (n * (n * n - 1))


def main() -> int:
    """Run, print and write; return 1 if the orders differ too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="rounds through all layouts")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default benchmarks/results/<date>-planner-on-cpu.json)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meshwright.tensor_parallel.megatron.load_mappings(
        torch.device("cpu")
    )  # its import takes seconds: once, before the fork
    assert meshwright_models.gpt2
    console = Console(width=150)
    configs = {
        ", ".join(f"{k}={v}" for k, v in layout.items()): config_of(layout) for layout in LAYOUTS
    }
    measured: dict[str, list[float]] = {name: [] for name in configs}
    with RankPool(8) as pool:
        hardware = calibrated(pool)
        for _ in range(arguments.repeats):
            for name, config in configs.items():
                size = math.prod(config.parallel.degrees)
                seconds = pool.run(measure, size, config, arguments.steps, timeout_s=TIMEOUT_S)
                measured[name] += [max(each) for each in zip(*seconds, strict=True)]
    table = Table("layout", "predicted s", "measured s", "predicted / measured")
    rows = []
    for name, config in configs.items():
        cache = ModelCache(config, ExecutionOptions(fuses_any_attention=False))
        predicted = evaluate(cache, hardware, config, choice_of(config)).time.total
        fastest = min(measured[name])
        rows.append(
            {
                "layout": name,
                "predicted_s": predicted,
                "measured_s": fastest,
                "all_s": measured[name],
            }
        )
        table.add_row(name, f"{predicted:.3f}", f"{fastest:.3f}", f"{predicted / fastest:.2f}")
    console.print(table)
    found = correlation([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows])
    off = statistics.fmean(abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows)
    console.print(
        f"rank correlation {found:.3f} over {len(rows)} layouts; {off:.1%} off in the mean"
    )
    report = {
        "environment": environment(
            shlex.join(["python", "benchmarks/planner_on_cpu.py", *sys.argv[1:]])
        ),
        "bars": {"rank_correlation": LEAST_CORRELATION},
        "hardware": hardware.model_dump(),
        "rows": rows,
        "rank_correlation": found,
        "mean_off": off,
        "problems": [f"rank correlation {found:.3f}"] if found < LEAST_CORRELATION else [],
    }
    return conclude("planner-on-cpu", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
