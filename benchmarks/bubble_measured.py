"""Idle time of the real executor beside the simulator's, for every schedule, on ranks that sleep.

    python benchmarks/bubble_measured.py [--pp 4] [--chunks 8] [--steps 3] [--ms 40] [--out FILE]

Pool ranks run the executor over gloo. Each stage is one layer that sleeps: in forward for F, in the
backward of its input for I, and for W in the gradient of its weight. A schedule that splits the
backward has W apart; a whole backward sleeps for I and W, one after the other. F, I and W are --ms
each, so B is twice that. A sleeping rank needs no core, so two cores are enough to measure the
waits of four ranks. With two stages on a rank, each sleeps as long as the one stage of a rank in
the other schedules.

Measured: spans of all ranks on one clock (perf_counter is common to the processes of a machine).
The share is idle time from the first F to the last backward, over the ranks' time; the median of
the steps after a first. Simulated: simulate() with the same seconds and no time for messages. Exit
code 1: they are further apart than 3 points.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from report import conclude, environment
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.plan import SplitBackward
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.values import Microbatch, StageSpec, describe_value
from meshwright.schedule.action import Schedule
from meshwright.schedule.analysis import Costs, Span, Timeline, bubble_share, simulate
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright_launch.pool import RankPool

INTERLEAVES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_h2": 1, "zb_v": 2}
MOST_POINTS = 3.0


class Sleep(torch.autograd.Function):
    """Addition x + weight that sleeps for F, I and W; a split backward defers W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sleep_s: float, split: SplitBackward | None
    ) -> Tensor:
        """Sleep for F; return x + weight, (B, 1)."""
        ctx.weight, ctx.sleep_s, ctx.split = weight, sleep_s, split
        time.sleep(sleep_s)
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Sleep for I; compute the weight gradient (W) now, or defer it."""
        time.sleep(ctx.sleep_s)

        def weight_gradient() -> Tensor:
            time.sleep(ctx.sleep_s)
            return gradient.sum(0)

        later = (
            weight_gradient() if ctx.split is None else ctx.split.defer(ctx.weight, weight_gradient)
        )
        return gradient, later, None, None


class Sleeper(nn.Module):
    """Layer with one parameter that sleeps, (B, 1) -> (B, 1)."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.split: SplitBackward | None = None
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the weight to x, (B, 1) -> (B, 1), and sleep for F."""
        found: Tensor = Sleep.apply(x, self.weight, self.sleep_s, self.split)  # type: ignore[no-untyped-call]
        return found


class OneNumber(NamedTuple):
    """Endless feed of one number per micro-batch."""

    def microbatch(self, m: int) -> Microbatch:
        """Return the number m as a micro-batch, (1, 1)."""
        return Microbatch(torch.full((1, 1), float(m)), torch.zeros(1, 1), self.sample_indices(m))

    def sample_indices(self, m: int) -> Tensor:
        """Return the sample index of micro-batch m, (1,)."""
        return torch.tensor([m])

    def length(self, m: int) -> int | None:
        """Return None: samples are whole."""
        return None


def rows_in_time(
    rank: int, pp: int, schedule: Schedule, sleep_s: float, steps: int
) -> list[list[Span]]:
    """Run the executor; return this rank's spans in each step,
    in seconds of the machine's clock.
    """
    mesh = open_mesh(Grid(pp=pp), "cpu")
    value = describe_value(torch.zeros(1, 1, requires_grad=True), "a stage")
    last = schedule.num_stages - 1
    stages = {}
    for index in schedule.stages_of(rank):
        sleeper = Sleeper(sleep_s)
        stages[index] = Stage(
            StageSpec(
                index,
                value if index > 0 else None,
                value if index < last else None,
                splits_backward=schedule.splits_backward,
            ),
            nn.Sequential(sleeper),
            lambda output, labels: output - labels,
        )
        sleeper.split = stages[index].split
    executor = Executor(schedule, mesh.pp, stages, mesh.device)
    found = []
    for _ in range(steps + 1):
        dist.barrier()
        times = executor.run(OneNumber()).times
        found.append(
            [
                s._replace(start=s.start + times.start_s, end=s.end + times.start_s)
                for s in times.spans
            ]
        )
    return found[1:]


def compare(
    pool: RankPool, name: str, pp: int, chunks: int, sleep_s: float, steps: int
) -> dict[str, Any]:
    """Measure and simulate one schedule."""
    schedule = lower(build(name, pp, chunks, INTERLEAVES[name]))
    ranks = pool.run(rows_in_time, pp, schedule, sleep_s, steps)
    timelines = [
        Timeline(name, tuple(span for spans in step for span in spans))
        for step in zip(*ranks, strict=True)
    ]
    shares = [bubble_share(timeline) for timeline in timelines]
    costs = Costs(f=sleep_s, b=2 * sleep_s, i=sleep_s, w=sleep_s)
    measured, simulated = statistics.median(shares), bubble_share(simulate(schedule, costs))
    return {
        "schedule": name,
        "interleave": INTERLEAVES[name],
        "measured_share": measured,
        "measured_shares": shares,
        "simulated_share": simulated,
        "difference_points": 100 * (measured - simulated),
    }


def main() -> int:
    """Run, print and write; return 1 if a schedule is further off than allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps, after one that is not (default 3)"
    )
    parser.add_argument(
        "--ms", type=float, default=40.0, help="milliseconds of F, I and W (default 40)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file (default benchmarks/results/<date>-bubble-measured.json)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    with RankPool(arguments.pp) as pool:
        rows = [
            compare(pool, name, arguments.pp, arguments.chunks, arguments.ms / 1e3, arguments.steps)
            for name in INTERLEAVES
        ]
    table = Table("schedule", "interleave", "measured", "simulated", "difference, points")
    for row in rows:
        shares = [f"{100 * row[key]:.1f} %" for key in ("measured_share", "simulated_share")]
        table.add_row(
            row["schedule"], str(row["interleave"]), *shares, f"{row['difference_points']:+.1f}"
        )
    console.print(table)
    command = shlex.join(["python", "benchmarks/bubble_measured.py", *sys.argv[1:]])
    problems = [
        f"{row['schedule']}: {row['difference_points']:+.1f} points"
        for row in rows
        if abs(row["difference_points"]) > MOST_POINTS
    ]
    report = {
        "environment": environment(command),
        "pp": arguments.pp,
        "chunks": arguments.chunks,
        "sleep_ms": arguments.ms,
        "schedules": rows,
        "problems": problems,
    }
    return conclude("bubble-measured", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
