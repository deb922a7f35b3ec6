"""Python calls of a training step, counted by ``sys.setprofile``: the same on every machine,
under any load.

    python benchmarks/python_calls.py [--only LAYOUT] [--out FILE]

The GPT of side_by_side.py with 64 features; 16 samples a step in micro-batches of 2. A count is
that of one rank in one step, mean over the ranks. ``ours`` are functions of this framework, without
the model's; the others are torch's, megatron-core's and the model's own. Where a layout is new,
compare it with the same command at another commit.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from contenders import Ours
from report import conclude, environment
from rich.console import Console
from rich.table import Table
from task import model_options

import meshwright.pipeline.executor
import meshwright.tensor_parallel.megatron
from meshwright_launch.pool import RankPool

FRAMEWORK = f"{Path(meshwright.pipeline.executor.__file__).parents[1]}/"
STEPS_BEFORE = 2
"""Steps before the counted one: checks of the first forward, imports, connections."""

LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "one rank": ((1, 1, 1), {}),
    "dp=2 zero=0": ((2, 1, 1), {"zero": 0}),
    "dp=2 zero=1": ((2, 1, 1), {"zero": 1}),
    "dp=2 zero=2": ((2, 1, 1), {"zero": 2}),
    "tp=2": ((1, 1, 2), {}),
    "pp=2 1f1b": ((1, 2, 1), {}),
    "pp=2 zb_v": ((1, 2, 1), {"pipeline": {"schedule": "zb_v", "interleave": 2}}),
    "dp=2 pp=2 tp=2 1f1b": ((2, 2, 2), {"tied": False}),
}
"""Name -> (dp, pp, tp) and other keys of the configuration."""


class Calls(NamedTuple):
    """Python calls of one rank in one step."""

    total: int
    ours: int


def count(rank: int, world_size: int, layout: str) -> Calls:
    """Count the calls of this rank in one step."""
    torch.set_num_threads(1)
    degrees, changes = LAYOUTS[layout]
    options = {**model_options(tied=changes.get("tied", True)), "hidden_size": 64}
    ours = Ours(*degrees, model={"options": options}, **changes)
    for _ in range(STEPS_BEFORE):
        ours.step()
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        ours.step()
    finally:
        sys.setprofile(None)
    rooms = [file.removeprefix(FRAMEWORK) for file in files if file.startswith(FRAMEWORK)]
    return Calls(len(files), len(rooms))


def main() -> int:
    """Count, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=list(LAYOUTS), action="append", help="may be given several times"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default benchmarks/results/<date>-python-calls.json)"
    )
    arguments = parser.parse_args()
    # takes seconds: once, before the fork
    meshwright.tensor_parallel.megatron.load_mappings(torch.device("cpu"))
    console, found = Console(width=100), {}
    table = Table("layout", "calls", "ours")
    with RankPool(8) as pool:
        for layout in arguments.only or LAYOUTS:
            dp, pp, tp = LAYOUTS[layout][0]
            ranks = [
                Calls(*each) for each in pool.run(count, dp * pp * tp, layout, timeout_s=600.0)
            ]
            found[layout] = Calls(
                *(round(statistics.mean(counts)) for counts in zip(*ranks, strict=True))
            )
            table.add_row(layout, *(f"{number:,}" for number in found[layout]))
    console.print(table)
    command = shlex.join(["python", "benchmarks/python_calls.py", *sys.argv[1:]])
    report = {
        "environment": environment(command),
        "layouts": {name: calls._asdict() for name, calls in found.items()},
        "problems": [],
    }
    return conclude("python-calls", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
