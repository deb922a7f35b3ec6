"""Tables of the CUDA path that need no GPU: exposed communication, peak memory.

    python benchmarks/gpu_tables.py exposed                  communication that a Llama-3-8B step waits for, simulated
    python benchmarks/gpu_tables.py memory [--tree DIR]      peak of Llama-3-8B and -70B by dry run, of this checkout or
                                                             of another, such as a `git worktree` of
                                                             an older commit

``exposed``: the step's seconds minus those of the same step with links of infinite speed, with a
column's messages behind its products in backward, and without. ``memory`` runs the command
``meshwright dryrun`` of the tree.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.config import load, resolve
from meshwright_plan.commands.plans import execution_options
from meshwright_plan.planner.cost import step_time
from meshwright_plan.planner.hardware import Link, read_hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.rates import PerformanceModel

ROOT = Path(__file__).parents[1]
STEPS = {
    "tp 8": ["--parallel.dp=1", "--parallel.tp=8", "--batch.global_batch=16"],
    "pp 4": [
        "--parallel.dp=1",
        "--parallel.tp=1",
        "--parallel.sequence=false",
        "--parallel.pp=4",
        "--batch.global_batch=16",
    ],
    "dp 64": [
        "--parallel.dp=64",
        "--parallel.tp=1",
        "--parallel.sequence=false",
        "--batch.global_batch=1024",
    ],
}
"""Layouts of Llama-3-8B with 16 micro-batches of one sample per replica."""
MEMORY = {
    "8B, tp 2, dp 8": ["llama3-8b", "--nodes=2", "--parallel.dp=8", "--parallel.tp=2"],
    "70B, tp 8, pp 4, dp 8": [
        "llama3-70b",
        "--nodes=32",
        "--parallel.dp=8",
        "--parallel.pp=4",
        "--parallel.tp=8",
    ],
}


def exposed() -> Table:
    """Simulate the steps on H100s, with and without the overlap of columns,
    and with infinitely fast links.
    """
    table = Table("Llama-3-8B on", "step", "blocking columns", "overlapped columns")
    hardware = read_hardware("h100")
    endless = Link(bytes_per_s=1e30, latency_s=0.0)
    for name, overrides in STEPS.items():
        config = resolve(load(str(ROOT / "configs/llama3-8b.toml"), overrides), None)
        layout = ModelCache(config, execution_options(config.train, hardware)).layout(config)
        performance = PerformanceModel.of(hardware)
        blocking = performance.traits._replace(overlaps_tp_with_weight_gradients=False)
        links = hardware.model_copy(update={"node_link": endless, "cluster_link": endless})
        alone = PerformanceModel(
            links, performance.fractions._replace(message_s=0.0), performance.traits
        )
        least = step_time(layout, alone).total
        before, after = (
            step_time(layout, each).total
            for each in (performance._replace(traits=blocking), performance)
        )
        shares = (f"{1 - least / total:.1%} ({total - least:.3f} s)" for total in (before, after))
        table.add_row(name, f"{after:.2f} s", *shares)
    return table


def memory(tree: Path) -> Table:
    """Run the dry run of the checkout ``tree``."""
    table = Table("job, S 8,192", "peak of the fullest rank")
    if not (tree / "launch" / "meshwright_launch").is_dir():
        sys.exit(
            f"--tree {tree}: no checkout with launch/meshwright_launch: run the dry run of an older"
            " one by itself"
        )
    roots = os.pathsep.join(str(tree / root) for root in ("framework", "models", "launch", "tools"))
    for name, (config, *overrides) in MEMORY.items():
        command = [
            sys.executable,
            "-m",
            "meshwright_launch",
            "dryrun",
            str(tree / f"configs/{config}.toml"),
        ]
        done = subprocess.run(
            [*command, "--devices-per-node=8", *overrides],
            env=os.environ | {"PYTHONPATH": roots, "OMP_NUM_THREADS": "1"},
            cwd=tree,
            capture_output=True,
            text=True,
            check=False,  # 1: it runs out of memory
        )
        (found,) = re.findall(r"most memory +(.*)", done.stdout)
        table.add_row(name, found)
    return table


def main() -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("exposed", "memory"))
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="checkout whose dry run is asked (memory)"
    )
    arguments = parser.parse_args()
    tables = {"exposed": exposed, "memory": lambda: memory(arguments.tree.resolve())}
    Console(width=140).print(tables[arguments.table]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
