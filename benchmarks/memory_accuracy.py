"""Accuracy of the predicted memory of a rank:
the peak of a real step on CPU against the predicted peak.

    python benchmarks/memory_accuracy.py [--only TEXT] [--limit N] [--out FILE]

Each case runs for real, with every rank as a process. After two steps the peak of live bytes in a
third is measured on each rank: of all storages that any tensor operation has made and that still
live. The prediction is for one rank of each pipeline rank; the measurements of all its replicas and
tensor-parallel ranks are compared with it. Cases: GPT-2, Llama and T5; every schedule, ZeRO 0 to 3,
recomputation, sequence parallelism, offload, the optimizers, float32 and bfloat16.

The difference is (predicted - measured) / measured, of the rank with the largest one. Exit code 1:
more than 3 % in the mean over the cases, or more than 8 % in any.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from observe import Observer
from report import conclude, environment
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_map

import meshwright.tensor_parallel.megatron
from meshwright.build import build
from meshwright.config import RunConfig, parse, resolve
from meshwright.data.sources import example
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright_launch.pool import RankPool
from meshwright_plan.dryrun.fake_step import grid_of, profile_rank
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.memory.reduction import GLOO
from meshwright_plan.planner.model_cache import ModelCache

MOST_MEAN, MOST_WORST = 0.03, 0.08
TIMEOUT_S = 600.0
SEQUENCE_LENGTH = 48
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 500,
        "hidden_size": 64,
        "num_layers": 6,
        "num_heads": 4,
        "max_sequence_length": 64,
    },
    "llama": {
        "vocab_size": 500,
        "hidden_size": 64,
        "num_layers": 6,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 160,
        "max_sequence_length": 64,
    },
    "t5": {"vocab_size": 500, "hidden_size": 64, "num_layers": 3, "num_heads": 4},
}


class Case(NamedTuple):
    """One run; fields that are not given have their defaults."""

    model: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    zero: int = 1
    recompute: str = "none"
    dtype: str = "float32"
    optimizer: str = "adamw"
    sequence: bool = False
    offload: bool = False
    shard_factor: int | None = None
    reduce: str | None = None
    chunks: int = 4
    dropout: float = 0.0
    adapters: int = 0

    def __str__(self) -> str:
        axes = " ".join(
            f"{axis}={n}"
            for axis, n in (("dp", self.dp), ("pp", self.pp), ("tp", self.tp))
            if n > 1
        )
        more = [
            f"{name}={value}"
            for name, value in self._asdict().items()
            if value != self._field_defaults.get(name)
        ]
        more = [each for each in more if each.partition("=")[0] not in ("model", "dp", "pp", "tp")]
        return " ".join([self.model, axes, *more]).replace("  ", " ")

    def config(self) -> RunConfig:
        """Return the resolved configuration."""
        optimizer: dict[str, Any] = {"name": self.optimizer}
        if self.optimizer == "adamw8bit":
            optimizer["block_size"] = 32
        config = RunConfig.model_validate(
            {
                "model": {
                    "builder": f"meshwright_models.{self.model}:build",
                    "options": {**MODELS[self.model], "dropout": self.dropout},
                },
                "data": {
                    "train": "in memory",
                    "sequence_length": SEQUENCE_LENGTH,
                    "task": "span_corruption" if self.model == "t5" else "causal",
                },
                "batch": {"micro_batch_size": 2, "chunks": self.chunks},
                "parallel": {
                    "dp": self.dp,
                    "pp": self.pp,
                    "tp": self.tp,
                    "zero": self.zero,
                    "sequence": self.sequence,
                    "offload": self.offload,
                    "shard_factor": self.shard_factor,
                    "reduce": self.reduce,
                    "bucket_bytes": 2**17,
                },
                "pipeline": {"schedule": self.schedule, "recompute": self.recompute},
                "optimizer": optimizer,
                "adapter": {
                    "rank": self.adapters,
                    "targets": ["block*.attention.*", "block*.mlp.*"] if self.adapters else [],
                },
                "train": {"dtype": self.dtype, "device": "cpu"},
            }
        )
        return resolve(config, self.dp * self.pp * self.tp)


CASES = [
    *(Case(model) for model in MODELS),
    *(
        Case("gpt2", pp=4, schedule=schedule, chunks=6)
        for schedule in ("1f1b", "gpipe", "zb_h1", "zb_h2")
    ),
    *(
        Case("llama", pp=2, schedule=s, chunks=6)
        for s in ("interleaved_1f1b", "zb_v", "v_half", "v_min")
    ),
    *(Case("gpt2", dp=4, zero=zero) for zero in (0, 1, 2, 3)),
    *(Case("llama", dp=4, zero=zero, shard_factor=2, dtype="bfloat16") for zero in (1, 2, 3)),
    *(
        Case("gpt2", recompute=recompute, dropout=0.1)
        for recompute in ("none", "pointwise", "selective", "full")
    ),
    *(
        Case("llama", pp=2, recompute=recompute, chunks=6)
        for recompute in ("pointwise", "selective", "full")
    ),
    *(Case("t5", pp=2, recompute=recompute, dtype="bfloat16") for recompute in ("none", "full")),
    *(Case(model, tp=2) for model in MODELS),
    *(Case(model, tp=2, sequence=True) for model in ("gpt2", "llama")),
    Case("llama", tp=2, sequence=True, recompute="selective"),
    Case(
        "llama",
        pp=2,
        tp=2,
        sequence=True,
        schedule="zb_h1",
        dtype="bfloat16",
        recompute="pointwise",
    ),
    Case("t5", dp=2, zero=3, recompute="pointwise", dropout=0.1),
    Case("llama", dp=2, pp=2, tp=2, sequence=True, dtype="bfloat16"),
    Case("gpt2", dp=2, pp=2, tp=2, zero=2),
    Case("t5", dp=2, pp=2, tp=2),
    Case("gpt2", dp=2, pp=2, schedule="zb_h1", zero=3),
    Case("llama", dp=2, zero=2, reduce="step"),
    Case("llama", dp=2, tp=2, zero=3, dtype="bfloat16", recompute="full"),
    *(Case("gpt2", dp=2, zero=zero, offload=True) for zero in (0, 1, 3)),
    *(Case("llama", dp=2, optimizer=optimizer) for optimizer in ("sgd", "adamw8bit")),
    Case("gpt2", dp=2, optimizer="adamw8bit", zero=3),
    Case("t5", dp=2, zero=2, optimizer="sgd", dropout=0.1),
    Case("gpt2", pp=2, schedule="interleaved_1f1b", dtype="bfloat16", dropout=0.1),
    Case("llama", dp=2, pp=2, schedule="zb_v", zero=2),
    Case("t5", pp=3, schedule="gpipe", chunks=6),
    Case("llama", adapters=4),
    Case("gpt2", dp=2, zero=3, dropout=0.1, adapters=4),
    Case("llama", dp=2, zero=2, dtype="bfloat16", adapters=4),
    Case("llama", pp=2, tp=2, sequence=True, schedule="zb_h1", dtype="bfloat16", adapters=4),
    Case("gpt2", dp=2, pp=2, recompute="full", adapters=4),
    Case("llama", tp=2, recompute="pointwise", adapters=4),
]


class RandomSource:
    """Samples of the right shape, drawn anew each time.
    A :class:`meshwright.data.sources.Source`.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.batch.micro_batch_size is not None
        self._inputs, self._labels = example(config.data, config.batch.micro_batch_size)

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return token ids that no model takes for padding."""

        def drawn(outline: Tensor) -> Tensor:
            return torch.randint(1, 400, outline.shape)

        return tree_map(drawn, self._inputs), drawn(self._labels)


def measure(rank: int, world_size: int, config_json: str) -> int:
    """Return the peak of live bytes of this rank in its third step."""
    config = parse(config_json)
    feed = RandomSource(config)
    with Observer() as observer:
        parts = build(config, open_mesh(grid_of(config.parallel), "cpu"), (feed, {}))
        for _ in range(2):
            take_step(parts)
            for replica in parts.replicas.values():
                replica.wait_for_weights()
        gc.collect()
        # as in the dry run: what Python's collector finds it finds at a moment of its own
        gc.disable()
        observer.restart()
        try:
            take_step(parts)
        finally:
            gc.enable()
    return observer.peak_bytes


def dry_run(config: RunConfig) -> list[int]:
    """Predict the peak bytes of each pipeline rank by a dry run of its first rank."""
    per_stage = grid_of(config.parallel).dp * grid_of(config.parallel).tp
    return [
        profile_rank(config, pp_rank * per_stage).both_bytes
        for pp_rank in range(config.parallel.pp)
    ]


def planned(config: RunConfig) -> list[int]:
    """Predict the peak bytes of each pipeline rank as `meshwright plan` does:
    layer profiles along the schedule row.
    """
    layout = ModelCache(config, ExecutionOptions(fuses_any_attention=False)).layout(config)
    found = [layout.memory(pp_rank, GLOO) for pp_rank in range(config.parallel.pp)]
    return [each.total + each.host for each in found]


PREDICTORS: dict[str, Callable[[RunConfig], list[int]]] = {"dry run": dry_run, "planned": planned}
"""Name -> function from a resolved configuration to the peak bytes by pipeline rank.
Each adds a column.
"""


def compare(pool: RankPool, case: Case) -> dict[str, Any]:
    """Measure one case and compare it with all predictions."""
    config = case.config()
    grid, started_s = grid_of(config.parallel), time.perf_counter()
    measured = pool.run(measure, grid.size, config.model_dump_json(), timeout_s=TIMEOUT_S)
    row: dict[str, Any] = {
        "case": str(case),
        "measured": measured,
        "measuring_s": time.perf_counter() - started_s,
    }
    for name, predict in PREDICTORS.items():
        started_s = time.perf_counter()
        predicted = predict(config)
        off = [
            predicted[grid.coordinates(rank).pp_rank] / number - 1
            for rank, number in enumerate(measured)
        ]
        row[name] = {
            "predicted": predicted,
            "off": max(off, key=abs),
            "seconds": time.perf_counter() - started_s,
        }
    return row


def main() -> int:
    """Run the cases, print and write the report; return 1 if a prediction misses its bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose text holds this")
    parser.add_argument("--limit", type=int, default=len(CASES), help="at most so many cases")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file (default benchmarks/results/<date>-memory-accuracy.json)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meshwright.tensor_parallel.megatron.load_mappings(
        torch.device("cpu")
    )  # its import takes seconds: once, before the fork
    console = Console(width=150)
    report: dict[str, Any] = {
        "environment": environment(
            shlex.join(["python", "benchmarks/memory_accuracy.py", *sys.argv[1:]])
        ),
        "bars": {"mean": MOST_MEAN, "worst": MOST_WORST},
        "rows": [],
    }
    with RankPool(8) as pool:
        for case in [case for case in CASES if arguments.only in str(case)][: arguments.limit]:
            row = compare(pool, case)
            report["rows"].append(row)
            shown = "  ".join(f"{name} {row[name]['off']:+.3%}" for name in PREDICTORS)
            console.print(
                f"{row['case']:70s} {max(row['measured']):>12,} bytes  {shown}", highlight=False
            )
    problems = []
    table = Table(
        "predictor", "cases", "ranks", "mean difference", "largest", "where", "within 1 %"
    )
    for name in PREDICTORS:
        off = {row["case"]: abs(row[name]["off"]) for row in report["rows"]}
        mean, worst = statistics.fmean(off.values()), max(off, key=off.__getitem__)
        report[name] = {"cases": len(off), "mean": mean, "largest": off[worst], "largest_in": worst}
        ranks = sum(len(row["measured"]) for row in report["rows"])
        within = sum(each <= 0.01 for each in off.values())
        table.add_row(
            name, str(len(off)), str(ranks), f"{mean:.3%}", f"{off[worst]:.3%}", worst, str(within)
        )
        if mean > MOST_MEAN or off[worst] > MOST_WORST:
            problems.append(f"{name}: {mean:.2%} in the mean, {off[worst]:.2%} in {worst}")
    console.print(table)
    report["problems"] = problems
    return conclude("memory-accuracy", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
