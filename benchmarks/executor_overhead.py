"""Cost of running a schedule whose stages cost nothing:
this framework's executor beside torch.distributed.pipelining.

    python benchmarks/executor_overhead.py [--only NAME] [--repeats 9] [--steps 20] [--pp 4]
    [--chunks 8] [--out FILE]

Each stage is a linear with one weight on one number, so that only the runtime is left: the loop
over actions, the bookkeeping, autograd's entry and exit, the posting of messages. Both run the same
schedule on the same ranks of the same pool, over the same process group, in turns of a few steps: A
B, B A, ... An action is a forward or a backward of one micro-batch of one stage (halves of a
backward count as one). The columns are

    Python        CPU time per action of the thread that runs Python, mean of the ranks, when messages take no time:
                  send and recv of the process group are replaced, for both, by calls that complete
                  at once
    with gloo     the same with real messages, which add system calls and the waking of other threads, on whichever
                  thread they fall
    all threads   gloo's own included, which depends on how ranks share cores
    wall          time of a step over the actions of a rank

A ratio compares adjacent turns.

Exit code 1: the two compute different losses, or ours takes more of Python's time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from contenders import Shown
from measure import STEPS_SHOWN, race
from report import conclude, environment, repeats_of, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.values import Microbatch, StageSpec, describe_value
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright_launch.pool import RankPool

TIMEOUT_S = 600.0
"""Timeout of all turns of a schedule, on a machine with other users."""
Times = dict[str, float]
"""Seconds by contender."""

THEIRS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb_v": ScheduleZBVZeroBubble,
}
"""Name of our schedule -> torch's runtime of the same schedule."""


def stages_per_rank(name: str) -> int:
    """Return the stages per rank of a schedule."""
    return 2 if name in ("interleaved_1f1b", "zb_v") else 1


def samples(chunks: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a step, both (chunks, 1)."""
    return torch.arange(1.0, chunks + 1)[:, None] / chunks, torch.zeros(chunks, 1)


def layer() -> nn.Linear:
    """Build a layer, (1, 1) -> (1, 1), the same on both sides."""
    found = nn.Linear(1, 1, bias=False)
    nn.init.constant_(found.weight, 0.5)
    return found


def squares(output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each label, in the shape of ``labels``."""
    return (output - labels).square()


class Ours:
    """Contender: one rank of this framework's executor, on stages as build() makes them."""

    def __init__(self, name: str, pp: int, chunks: int) -> None:
        mesh = open_mesh(Grid(pp=pp), "cpu")
        schedule = lower(build(name, pp, chunks, stages_per_rank(name)))
        value = describe_value(torch.zeros(1, 1, requires_grad=True), "a stage")
        last = schedule.num_stages - 1
        stages = {
            index: Stage(
                StageSpec(
                    index,
                    value if index > 0 else None,
                    value if index < last else None,
                    splits_backward=schedule.splits_backward,
                ),
                nn.Sequential(layer()),
                squares,
            )
            for index in schedule.stages_of(mesh.at.pp_rank)
        }
        self.executor = Executor(schedule, mesh.pp, stages, mesh.device)
        self.batch = (*samples(chunks), torch.arange(chunks))
        self.indices = self.batch[-1].split(1)
        self.microbatches: list[Microbatch] = []
        self.reads = any(None in (stage.input_spec, stage.output_spec) for stage in stages.values())

    def microbatch(self, m: int) -> Microbatch:
        """Return one sample as a micro-batch."""
        return self.microbatches[m]

    def sample_indices(self, m: int) -> Tensor:
        """Return the index of the sample."""
        return self.indices[m]

    def length(self, m: int) -> int | None:
        """Return None: samples are whole."""
        return None

    def step(self) -> Shown:
        """Cut the batch into micro-batches, as torch's runtime does in its step,
        and run this rank's row.
        """
        if self.reads:
            parts = (part.split(1) for part in self.batch)
            self.microbatches = [Microbatch(*each) for each in zip(*parts, strict=True)]
        parts = self.executor.run(self).loss_parts
        return Shown(sum(float(part.loss_sum) for part in parts), 0.0)

    def settle(self) -> None:
        """Return at once: a step leaves no pending work."""


class Theirs:
    """Contender: one rank of torch's runtime."""

    def __init__(self, name: str, pp: int, chunks: int) -> None:
        mesh = open_mesh(Grid(pp=pp), "cpu")
        schedule = build(name, pp, chunks, stages_per_rank(name))
        mine = schedule.stages_of(mesh.at.pp_rank)
        stages = [
            PipelineStage(
                layer(), index, schedule.num_stages, mesh.device, group=mesh.pp.process_group
            )
            for index in mine
        ]
        self.is_first, self.is_last = 0 in mine, schedule.num_stages - 1 in mine
        kind: Any = THEIRS[name]
        self.schedule = kind(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=chunks,
            loss_fn=lambda output, labels: squares(output, labels).sum(),
            scale_grads=False,
        )
        self.inputs, self.labels = samples(chunks)

    def step(self) -> Shown:
        """Call the step() of torch's runtime."""
        losses: list[Tensor] = []
        self.schedule.step(
            *([self.inputs] if self.is_first else []),
            target=self.labels if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
        )
        return Shown(sum(float(loss.detach()) for loss in losses), 0.0)

    def settle(self) -> None:
        """Return at once: a step leaves no pending work."""


class _Done:
    """Handle of a message that is complete at once."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def race_alone(
    rank: int,
    world_size: int,
    builders: Mapping[str, Callable[[], Ours | Theirs]],
    repeats: int,
    steps: int,
) -> list[Times]:
    """Return the seconds per step of the Python thread, by contender, for each repeat,
    without messages.
    """
    contenders = {name: builder() for name, builder in builders.items()}
    for contender in contenders.values():
        for _ in range(STEPS_SHOWN):  # torch's runtime exchanges shapes in its first step
            contender.step()
    found: list[Times] = []
    at_once: Any = lambda group, tensors, peer, tag: _Done()  # noqa: E731
    with mock.patch.multiple(dist.ProcessGroup, send=at_once, recv=at_once):
        for turn in range(world_size):  # one rank at a time has the machine to itself
            dist.barrier()
            for repeat in range(repeats if turn == rank else 0):
                order = list(contenders)[:: 1 if repeat % 2 == 0 else -1]
                found.append({name: _thread_s(contenders[name], steps) for name in order})
        dist.barrier()
    return found


def _thread_s(contender: Ours | Theirs, steps: int) -> float:
    start_s = time.thread_time()
    for _ in range(steps):
        contender.step()
    return (time.thread_time() - start_s) / steps


def compare(
    pool: RankPool, name: str, pp: int, chunks: int, repeats: int, steps: int
) -> dict[str, Any]:
    """Measure both runtimes with one schedule."""
    builders = {
        "ours": partial(Ours, name, pp, chunks),
        "theirs": partial(Theirs, name, pp, chunks),
    }
    alone = pool.run(race_alone, pp, builders, repeats, steps, timeout_s=TIMEOUT_S)
    ranks = pool.run(race, pp, builders, repeats, steps, timeout_s=TIMEOUT_S)
    actions = 2 * chunks * stages_per_rank(name)  # of a rank, in a step
    found: dict[str, Any] = {
        "schedule": name,
        "torch": THEIRS[name].__name__,
        "actions_of_a_rank": actions,
    }
    blocks = {who: repeats_of(ranks, who) for who in builders}
    python_s = {
        who: [sum(times[who] for times in ranks) for ranks in zip(*alone, strict=True)]
        for who in builders
    }
    for who, repeat in blocks.items():
        found[who] = {
            "python_us_per_action": 1e6 * statistics.median(python_s[who]) / pp / actions,
            "python_us_of_each_rank": [
                1e6 * statistics.median(times[who] for times in rank) / actions for rank in alone
            ],
            "gloo_us_per_action": (
                1e6 * statistics.median(block.main_thread_s for block in repeat) / pp / actions
            ),
            "cpu_us_per_action": (
                1e6 * statistics.median(block.cpu_s for block in repeat) / pp / actions
            ),
            "wall_us_per_action": (
                1e6 * statistics.median(block.wall_s for block in repeat) / actions
            ),
            "losses": [
                sum(step.loss for step in shown)
                for shown in zip(*(r.shown[who] for r in ranks), strict=True)
            ],
            "repeats": repeat,
        }
    both = list(zip(blocks["ours"], blocks["theirs"], strict=True))
    found["python_ratio"] = spread(
        [a / b for a, b in zip(python_s["ours"], python_s["theirs"], strict=True)]
    )
    found["gloo_ratio"] = spread(
        [ours.main_thread_s / theirs.main_thread_s for ours, theirs in both]
    )
    found["cpu_ratio"] = spread([ours.cpu_s / theirs.cpu_s for ours, theirs in both])
    found["wall_ratio"] = spread([ours.wall_s / theirs.wall_s for ours, theirs in both])
    return found


def problems_of(found: dict[str, Any]) -> list[str]:
    """Return the problems: different losses, or more Python time than torch's."""
    ours, theirs = found["ours"]["losses"], found["theirs"]["losses"]
    problems = [f"{found['schedule']}: losses {ours} and {theirs}"] if ours != theirs else []
    ratio = found["python_ratio"].median
    if ratio >= 1:
        problems.append(f"{found['schedule']}: ours takes {ratio:.3f} of torch's Python time")
    return problems


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    kinds = {"python": "Python", "gloo": "with gloo", "cpu": "all threads", "wall": "wall"}
    columns = [f"{text}{of}" for text in kinds.values() for of in (" us: ours", " torch", " ratio")]
    table = Table("schedule", *columns)
    for row in rows:
        cells = []
        for kind in kinds:
            cells += [f"{row[who][f'{kind}_us_per_action']:.0f}" for who in ("ours", "theirs")]
            cells.append(str(row[f"{kind}_ratio"]))
        table.add_row(row["schedule"], *cells)
    console.print(table)


def main() -> int:
    """Run, print and write; return 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9, help="turns of both (default 9)")
    parser.add_argument("--steps", type=int, default=20, help="steps in one turn (default 20)")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument(
        "--only", choices=list(THEIRS), action="append", help="may be given several times"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file (default benchmarks/results/<date>-executor-overhead.json)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=220)
    sizes = (arguments.pp, arguments.chunks, arguments.repeats, arguments.steps)
    with RankPool(arguments.pp) as pool:
        rows = [compare(pool, name, *sizes) for name in arguments.only or THEIRS]
    problems = [problem for row in rows for problem in problems_of(row)]
    command = shlex.join(["python", "benchmarks/executor_overhead.py", *sys.argv[1:]])
    report = {
        "environment": environment(command),
        "pp": arguments.pp,
        "chunks": arguments.chunks,
        "schedules": rows,
        "problems": problems,
    }
    show(rows, console)
    return conclude("executor-overhead", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
