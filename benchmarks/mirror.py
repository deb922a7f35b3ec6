"""Cost of the mirror in memory (``watch.mirror``): its share of a step, and its bytes beside the formula.

    python benchmarks/mirror.py [--steps 10] [--out FILE]

Each model trains on dp 2 x pp 2 x tp 2 with ZeRO-1. The mirror is timed inside the same steps:
seconds of ``Mirror.after_step``, of the slowest rank, over seconds of ``take_step``. Its bytes must
be 2 x the tensors of a checkpoint and the headers of two files for each rank.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import environment
from rich.console import Console
from rich.table import Table
from task import Samples, run_config

from meshwright.build import build
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parts import StepEvent
from meshwright.run.mirror import Mirror
from meshwright.step import take_step
from meshwright_launch.leftovers import MEMORY
from meshwright_launch.pool import RankPool

RANKS = 8
TIMEOUT_S = 1800.0
MODELS = {"1.3 M": (128, 4, 4096), "27 M": (512, 8, 4096)}
"""Hidden size, number of layers and vocabulary, by number of parameters."""


class Times(NamedTuple):
    """Seconds of each step on one rank, and parameters of the model."""

    step_s: list[float]
    mirror_s: list[float]
    parameters: int


def measure(
    rank: int, world_size: int, options: dict[str, object], folder: Path, steps: int
) -> Times:
    """Take some steps, each followed by its mirror."""
    config = run_config(2, 2, 2)
    model = config.model.model_copy(update={"options": options})
    grid = Grid(dp=2, pp=2, tp=2)
    parts = build(
        config.model_copy(update={"model": model}), open_mesh(grid, "cpu"), (Samples(), {})
    )
    mirror = Mirror(parts, folder, 0)
    step_s, mirror_s = [], []
    for step in range(steps + 2):  # the first two lay out the files
        start_s = time.perf_counter()
        stats = take_step(parts)
        taken_s = time.perf_counter()
        event = StepEvent(
            stats, 0.0, is_first=step == 0, is_last=False, is_stopping=False, is_saving=False
        )
        mirror.after_step(parts, event)
        parts.mesh.world.barrier()  # the slowest rank's
        step_s.append(taken_s - start_s)
        mirror_s.append(time.perf_counter() - taken_s)
    return Times(step_s[2:], mirror_s[2:], parts.blueprint.num_parameters)


def main() -> int:
    """Run, print and write; return 1 if the bytes are not those of the formula."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of each model (default 10)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    table = Table("parameters", "step s", "mirror s", "share", "bytes", "2 x tensors", "more")
    console = Console(width=120)
    found: list[dict[str, Any]] = []
    is_exact = True
    with RankPool(RANKS) as pool:
        for name, (hidden_size, num_layers, vocab_size) in MODELS.items():
            options: dict[str, object] = {
                "vocab_size": vocab_size,
                "hidden_size": hidden_size,
                "num_layers": num_layers,
                "num_heads": 8,
                "max_sequence_length": 256,
                "dropout": 0.0,
                "tied": True,
            }
            with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                ranks = pool.run(
                    measure, RANKS, options, Path(folder), arguments.steps, timeout_s=TIMEOUT_S
                )
                files = list(Path(folder).glob("*/*.safetensors"))
                written = sum(path.stat().st_size for path in files)
                headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)
            step_s = statistics.median(ranks[0].step_s)
            mirror_s = statistics.median(ranks[0].mirror_s)
            expected = 2 * 12 * ranks[0].parameters
            is_exact = is_exact and written == expected + headers
            row = {
                "parameters": ranks[0].parameters,
                "step_s": step_s,
                "mirror_s": mirror_s,
                "bytes": written,
                "tensor_bytes": expected,
                "header_bytes": headers,
            }
            found.append(row)
            table.add_row(
                name,
                f"{step_s:.3f}",
                f"{mirror_s:.4f}",
                f"{mirror_s / step_s:.1%}",
                f"{written:,}",
                f"{expected:,}",
                f"{written - expected:,}",
            )
    console.print(table)
    if arguments.out is not None:
        command = shlex.join(["python", "benchmarks/mirror.py", *sys.argv[1:]])
        report = {"environment": environment(command), "models": found}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if is_exact else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
