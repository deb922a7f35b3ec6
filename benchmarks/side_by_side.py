"""This framework beside torch's own tools, on the same task, in turns, inside the same processes:
ratios, not times.

    python benchmarks/side_by_side.py [--only a|b|c] [--repeats 5] [--steps 3] [--out FILE]

    a   1 process     the loop that one writes by hand            ours with 1 rank
    b   8 ranks       DDP, ZeroRedundancyOptimizer, FSDP2         ours, dp=8, ZeRO-0 and ZeRO-1
    c   8 ranks       DTensor + torch's pipelining + FSDP2        ours, dp=2 x pp=2 x tp=2, 1f1b, ZeRO-1

All contenders of a comparison live in the same forked ranks and take turns of a few steps, A B C, C
B A, ... A ratio compares adjacent turns; its spread over the repeats is printed. On a machine with
other users, CPU seconds over all ranks are the steadier measure. All contenders must have the same
losses and gradient norms in their first steps.

Exit code 1: a contender computes another loss, bytes on the wire differ from the formulas, or a bar
is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shlex
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composition import Composition
from contenders import Ours, ddp, fsdp2, one_process, zero_redundancy
from measure import Builder, observe, race
from report import (
    Pair,
    conclude,
    contender_row,
    environment,
    problems_of,
    ratio_row,
    repeats_of,
    show,
    wire_rows,
)
from rich.console import Console
from task import BUILDER, GLOBAL_BATCH, MICRO_BATCH_SIZE, SEQUENCE_LENGTH, model_options
from wire import expected_bytes

import meshwright.tensor_parallel.megatron
from meshwright.mesh import Grid
from meshwright_launch.pool import RankPool

TIMEOUT_S = 1800.0


class Layout(NamedTuple):
    """Degrees of one of this framework's contenders."""

    dp: int
    pp: int
    tp: int


class Comparison(NamedTuple):
    """Contenders to compare. The loss of the first one is the reference."""

    title: str
    world_size: int
    tied: bool
    contenders: dict[str, Builder]
    layouts: dict[str, Layout]
    """Contenders of this framework with more than one rank;
    their bytes on the wire are compared with the formulas.
    """
    pairs: list[Pair]


COMPARISONS = {
    "a": Comparison(
        "(a) one process: the plain torch loop, and ours with one rank",
        1,
        True,
        {"plain torch": one_process, "ours, 1 rank": partial(Ours, 1, 1, 1)},
        {},
        [Pair("ours, 1 rank", "plain torch", bar=1.03)],
    ),
    "b": Comparison(
        "(b) 8 replicas: torch's DDP, ZeroRedundancyOptimizer and FSDP2, and ours with ZeRO-0 and"
        " ZeRO-1",
        8,
        True,
        {
            "one process": one_process,
            "DDP": ddp,
            "DDP + ZeroRedundancy": zero_redundancy,
            "FSDP2": fsdp2,
            "ours, ZeRO-0": partial(Ours, 8, 1, 1, zero=0),
            "ours, ZeRO-1": partial(Ours, 8, 1, 1, zero=1),
        },
        {"ours, ZeRO-0": Layout(8, 1, 1), "ours, ZeRO-1": Layout(8, 1, 1)},
        [
            Pair("ours, ZeRO-0", "DDP"),
            Pair("ours, ZeRO-1", "DDP + ZeroRedundancy"),
            Pair("ours, ZeRO-1", "FSDP2"),
            Pair("ours, ZeRO-1", "DDP"),
            Pair("ours, ZeRO-0", "one process"),
            Pair("ours, ZeRO-1", "one process"),
        ],
    ),
    "c": Comparison(
        "(c) dp 2 x pp 2 x tp 2, 1F1B: DTensor + torch.distributed.pipelining + FSDP2, and ours"
        " with ZeRO-1; untied on both sides, since torch's pipelining cannot tie",
        8,
        False,
        {
            "one process": partial(one_process, tied=False),
            "torch's parts": partial(Composition, 2, 2, 2),
            "ours, 2x2x2": partial(Ours, 2, 2, 2, tied=False),
        },
        {"ours, 2x2x2": Layout(2, 2, 2)},
        [
            Pair("ours, 2x2x2", "torch's parts", bar=1.0),
            Pair("ours, 2x2x2", "one process", bar=1.55),
        ],
    ),
}


def measure(comparison: Comparison, pool: RankPool, repeats: int, steps: int) -> dict[str, Any]:
    """Time all contenders in turns, then observe one step of each alone."""
    size = comparison.world_size
    ranks = pool.run(race, size, comparison.contenders, repeats, steps, timeout_s=TIMEOUT_S)
    seen = {
        name: pool.run(observe, size, builder, timeout_s=TIMEOUT_S)
        for name, builder in comparison.contenders.items()
    }
    wire = {
        name: wire_rows(
            seen[name],
            [expected_bytes(rank, *layout, tied=comparison.tied) for rank in range(size)],
            Grid(pp=layout.pp, dp=layout.dp, tp=layout.tp),
        )
        for name, layout in comparison.layouts.items()
    }
    blocks = [repeat for name in comparison.contenders for repeat in repeats_of(ranks, name)]
    return {
        "title": comparison.title,
        "world_size": size,
        "ratios": [ratio_row(ranks, pair) for pair in comparison.pairs],
        "contenders": {
            name: contender_row(ranks, seen[name], name) for name in comparison.contenders
        },
        "wire": wire,
        "others_cores": statistics.median(repeat.others_cpu_s / repeat.wall_s for repeat in blocks),
    }


def main() -> int:
    """Run, print and write; return 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=sorted(COMPARISONS), action="append", help="may be given several times"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns of every contender (default 5)"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps in one turn (default 3)")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default benchmarks/results/<date>-side-by-side.json)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meshwright.tensor_parallel.megatron.load_mappings(
        torch.device("cpu")
    )  # its import takes seconds: once, before the fork
    console = Console(width=140)
    report: dict[str, Any] = {
        "environment": environment(
            shlex.join(["python", "benchmarks/side_by_side.py", *sys.argv[1:]])
        ),
        "task": {
            "builder": BUILDER,
            "options": model_options(tied=True),
            "sequence_length": SEQUENCE_LENGTH,
            "global_batch": GLOBAL_BATCH,
            "micro_batch_size": MICRO_BATCH_SIZE,
            "dtype": "float32",
            "repeats": arguments.repeats,
            "steps": arguments.steps,
        },
        "comparisons": {},
    }
    where = report["environment"]
    console.print(
        f"torch {where['torch']}, {where['cpu']}, {where['cores']} cores, {where['date']}",
        highlight=False,
    )
    problems: list[str] = []
    with RankPool(8) as pool:
        for key in arguments.only or sorted(COMPARISONS):
            found = measure(COMPARISONS[key], pool, arguments.repeats, arguments.steps)
            report["comparisons"][key] = found
            show(found, console)
            problems += [f"({key}) {problem}" for problem in problems_of(found)]
    report["problems"] = problems
    return conclude("side-by-side", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
