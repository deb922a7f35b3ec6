"""Saving and loading a checkpoint, beside torch's distributed checkpoints (DCP), in turns inside the
same 8 ranks: ratios of wall time and of CPU seconds.

    python benchmarks/checkpoint_race.py [--repeats 5] [--hidden 1024] [--layers 6] [--out FILE]

Both sides hold weights and AdamW's moments of one model in float32, sharded over 8 replicas by
``fully_shard``, about 1 GB together, and write files that are synced to the disk. Ours hash them too.

    save     until the checkpoint is published           dcp.save, FileSystemWriter(sync_files=True)
    async    until the step may go on; CPU of the whole  dcp.async_save, likewise
    load     hash every file, then read                  dcp.load
    read     the same without hashes

Bars: wall and CPU of save and async at most DCP's. Exit code 1: a bar is missed, or ours are not as
many bytes as the tensors.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from report import environment, spread
from rich.console import Console
from rich.table import Table
from task import BUILDER, Samples, adamw, model_options, run_config
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import meshwright_models.gpt2
from meshwright.build import build
from meshwright.checkpoint import open_checkpoint
from meshwright.checkpoint.read import find
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.run.resume import resume
from meshwright.run.saving import Saver
from meshwright.run.tensors import restore
from meshwright_launch.pool import RankPool

RANKS = 8
TIMEOUT_S = 3600.0
RESULTS = Path(__file__).parent / "results"
BARS = {"save": 1.0, "async": 1.0}
"""Largest ratio of wall time and of CPU seconds, ours / DCP's, that passes."""


class Cost(NamedTuple):
    """Cost of one operation on one rank."""

    wall_s: float
    """From a barrier until every rank may go on."""
    cpu_s: float
    """CPU seconds of all threads of this rank, until nothing of the operation is left to do."""


class Ours:
    """This framework: 8 replicas with ZeRO-3, after one step of the optimizer."""

    def __init__(self, options: dict[str, object], folder: Path) -> None:
        config = run_config(RANKS, zero=3)
        model = config.model.model_copy(update={"options": options})
        # DCP deletes nothing: a save of ours reads the newest back before it deletes others
        checkpoint = config.checkpoint.model_copy(update={"keep_last": 1000})
        config = config.model_copy(update={"model": model, "checkpoint": checkpoint})
        self.parts = build(config, open_mesh(Grid(dp=RANKS), "cpu"), (Samples(), {}))
        self.parts.optimizer.step(1e-4, 1.0)
        self.folder = folder / "ours"
        self.saver = Saver(self.parts, self.folder, lambda text: None)

    def clear(self) -> None:
        """Delete all checkpoints but the newest."""
        for candidate in find(self.folder)[1:]:
            shutil.rmtree(candidate.path)

    def save(self) -> None:
        """Save and wait."""
        self._start(is_asynchronous=False)

    def begin(self) -> None:
        """Start a save: return when the step may go on."""
        self._start(is_asynchronous=True)

    def _start(self, *, is_asynchronous: bool) -> None:
        parts, config = self.parts, self.parts.config
        checkpoint = config.checkpoint.model_copy(update={"asynchronous": is_asynchronous})
        parts.config = config.model_copy(update={"checkpoint": checkpoint})
        parts.state.step += 1
        parts.state.samples_seen += config.batch.global_batch or 0
        self.saver.start()

    def finish(self) -> None:
        """Block until the started save is published."""
        self.saver.finish()

    def load(self) -> None:
        """Resume from the newest checkpoint."""
        resume(self.parts, self.folder, lambda text: None)

    def read(self) -> None:
        """Read the newest checkpoint without a look at its hashes."""
        with open_checkpoint(find(self.folder)[0].path) as checkpoint:
            restore(checkpoint, self.parts.replicas, self.parts.optimizer, 1, {})


class Dcp:
    """``fully_shard`` and torch's distributed checkpoints."""

    def __init__(self, options: dict[str, object], folder: Path) -> None:
        model = meshwright_models.gpt2.build(**options)  # type: ignore[arg-type]
        for name, layer in model.named_children():
            if name.startswith("block"):
                fully_shard(layer)
        fully_shard(model)
        optimizer = adamw(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.model: nn.Module = model
        self.optimizer = optimizer
        self.folder = folder / "dcp"
        self.number = 0
        self.gloo = dist.new_group(backend="gloo")
        self.pending: Any = None

    def state(self) -> dict[str, Any]:
        """Return the sharded state of model and optimizer."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def clear(self) -> None:
        """Delete all checkpoints but the newest."""
        for folder in self.folder.glob("*"):
            if folder.name != str(self.number):
                shutil.rmtree(folder)

    def writer(self) -> dcp.FileSystemWriter:
        """Return a writer of the next folder."""
        self.number += 1
        return dcp.FileSystemWriter(self.folder / str(self.number), sync_files=True)

    def save(self) -> None:
        """Save and wait."""
        dcp.save(self.state(), storage_writer=self.writer(), process_group=self.gloo)

    def begin(self) -> None:
        """Start a save: return when the step may go on."""
        self.pending = dcp.async_save(
            self.state(), storage_writer=self.writer(), process_group=self.gloo
        )

    def finish(self) -> None:
        """Block until the started save is complete."""
        self.pending.result()

    def load(self) -> None:
        """Load the newest checkpoint in place."""
        reader = dcp.FileSystemReader(self.folder / str(self.number))
        dcp.load(self.state(), storage_reader=reader, process_group=self.gloo)

    read = load


def timed(
    sides: Iterable[Ours | Dcp], begin: Callable[[], None], finish: Callable[[], None]
) -> Cost:
    """Measure an operation: wall time of ``begin``, CPU of both.

    Before it, old files are deleted, and the disk has written what it has.
    """
    if dist.get_rank() == 0:
        for side in sides:
            side.clear()
        os.sync()
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    begin()
    dist.barrier()
    wall_s = time.perf_counter() - start_s
    finish()
    dist.barrier()
    return Cost(wall_s, time.process_time() - start_cpu_s)


def race(
    rank: int, world_size: int, options: dict[str, object], folder: Path, repeats: int
) -> tuple[list[dict[str, dict[str, Cost]]], int]:
    """Run every operation of both sides in turns. Return the costs by side and operation of each
    repeat, and the bytes of the tensors in our checkpoint.
    """
    sides = {"ours": Ours(options, folder), "dcp": Dcp(options, folder)}
    found: list[dict[str, dict[str, Cost]]] = []
    for repeat in range(repeats + 1):  # the first one allocates
        order = list(sides)[:: 1 if repeat % 2 == 0 else -1]
        costs: dict[str, dict[str, Cost]] = {name: {} for name in sides}
        for operation in ("save", "async", "load", "read"):
            for name in order:
                side = sides[name]
                if operation == "async":
                    costs[name][operation] = timed(sides.values(), side.begin, side.finish)
                else:
                    costs[name][operation] = timed(
                        sides.values(), getattr(side, operation), lambda: None
                    )
        found.append(costs)
    parameters = sum(parameter.numel() for parameter in sides["dcp"].model.parameters())
    return found[1:], 3 * 4 * parameters


def rows(ranks: list[list[dict[str, dict[str, Cost]]]]) -> dict[str, dict[str, Any]]:
    """Return ratios and times by operation: wall of the slowest rank, CPU of all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for operation in ranks[0][0]["ours"]:
        wall: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        for name in ("ours", "dcp"):
            of_repeats = [
                [rank[repeat][name][operation] for rank in ranks] for repeat in range(len(ranks[0]))
            ]
            wall[name] = [max(cost.wall_s for cost in costs) for costs in of_repeats]
            cpu[name] = [sum(cost.cpu_s for cost in costs) for costs in of_repeats]
        found[operation] = {
            "wall_ratio": spread([a / b for a, b in zip(wall["ours"], wall["dcp"], strict=True)]),
            "cpu_ratio": spread([a / b for a, b in zip(cpu["ours"], cpu["dcp"], strict=True)]),
            "wall_s": {name: statistics.median(each) for name, each in wall.items()},
            "cpu_s": {name: statistics.median(each) for name, each in cpu.items()},
        }
    return found


def show(found: dict[str, dict[str, Any]], console: Console) -> None:
    """Print a line for each operation."""
    table = Table("", "wall, ours / DCP", "CPU, ours / DCP", "wall s", "CPU s")
    for operation, row in found.items():
        table.add_row(
            operation,
            str(row["wall_ratio"]),
            str(row["cpu_ratio"]),
            " / ".join(f"{seconds:.2f}" for seconds in row["wall_s"].values()),
            " / ".join(f"{seconds:.2f}" for seconds in row["cpu_s"].values()),
        )
    console.print(table)


def missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the bars that are missed."""
    return [
        f"{operation}: {ratio} is {found[operation][ratio].median:.3f}, more than {bar}"
        for operation, bar in BARS.items()
        for ratio in ("wall_ratio", "cpu_ratio")
        if found[operation][ratio].median > bar
    ]


def main() -> int:
    """Run, print and write; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of both sides (default 5)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (default 1024)")
    parser.add_argument("--layers", type=int, default=6, help="number of layers (default 6)")
    parser.add_argument("--folder", type=Path, help="folder to write to (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    sizes = {
        "vocab_size": 8192,
        "hidden_size": arguments.hidden,
        "num_layers": arguments.layers,
    }
    options = model_options(tied=True) | sizes
    console = Console(width=140)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        RankPool(RANKS) as pool,
    ):
        results = pool.run(
            race, RANKS, options, Path(folder), arguments.repeats, timeout_s=TIMEOUT_S
        )
        newest = find(Path(folder) / "ours")[0].path
        written = sum(path.stat().st_size for path in newest.glob("*.safetensors"))
        files = {path.name: path.stat().st_size for path in newest.glob("*.safetensors")}
    found = rows([costs for costs, _ in results])
    tensor_bytes = results[0][1]
    console.print(
        f"{tensor_bytes / 2**30:.2f} GiB of tensors, ours {written / 2**30:.3f} GiB in"
        f" {len(files)} files of {min(files.values()):,} to {max(files.values()):,} bytes",
        highlight=False,
    )
    show(found, console)
    problems = missed(found)
    if not tensor_bytes <= written <= 1.01 * tensor_bytes:
        problems.append(f"{written} bytes were written of {tensor_bytes}")
    for problem in problems:
        console.print(problem, highlight=False)
    command = shlex.join(["python", "benchmarks/checkpoint_race.py", *sys.argv[1:]])
    report = {"environment": environment(command), "builder": BUILDER, "options": options}
    if arguments.out is not None:
        report |= {"operations": found, "problems": problems}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
