"""Memory of one training step on a sample of 131,072 tokens:
one process against context-parallel ranks, on CPU.

    python benchmarks/long_sample.py [--length N] [--cp N] [--document N] [--out FILE]

A Llama of 2 layers, 8 query heads of 4 features, in float32; documents of 1,024 tokens, so that the
attention of a CPU takes seconds. Live bytes of a rank are those of all storages that any tensor
operation has made and that still live; its activations are their peak in a second step less those
before the step. The bar is 1.15 / cp of one process' activations. The exchange of keys has keys and
values of all tokens on top, 2 S G d b bytes an attention: in one group of heads, as with G = 1
key-value head, it keeps those of each attention; in n groups, as with G = 8, it has those of two
groups at a time. Exit code 1: a rank above the bar.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from observe import Observer
from report import conclude, environment
from rich.console import Console
from torch import Tensor

import meshwright.tensor_parallel.megatron
from meshwright.build import build
from meshwright.config import RunConfig, parse, resolve
from meshwright.context_parallel.grouped import num_groups
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright_launch.pool import RankPool
from meshwright_plan.dryrun.fake_step import grid_of

BAR = 1.15
LAYERS, HEADS, HEAD_DIM, VOCAB, BYTES = 2, 8, 4, 64, 4
TIMEOUT_S = 3600.0
WAYS = (("heads", "zigzag", HEADS), ("keys", "documents", HEADS), ("keys", "documents", 1))
"""Exchanges, orders and numbers of key-value heads that are measured."""


class Documents(NamedTuple):
    """Samples of drawn tokens with documents of one length.
    A :class:`meshwright.data.sources.Source`.
    """

    length: int
    document: int

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the tokens and document starts of these samples, and labels, each (B, S)."""
        drawn = torch.Generator().manual_seed(indices[0])
        tokens, labels = (
            torch.randint(VOCAB, (len(indices), self.length), generator=drawn) for _ in range(2)
        )
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        starts[:, :: self.document] = True
        return {"tokens": tokens, "starts": starts}, labels


def config_of(length: int, cp: int, exchange: str, order: str, kv_heads: int) -> RunConfig:
    """Return the run of one sample per step."""
    size = HEADS * HEAD_DIM
    options = {"vocab_size": VOCAB, "hidden_size": size, "num_layers": LAYERS, "num_heads": HEADS}
    options |= {"num_kv_heads": kv_heads, "ffn_size": 2 * size, "max_sequence_length": length}
    parallel = {"dp": 1, "cp": cp} | (
        {"cp_exchange": exchange, "cp_order": order} if cp > 1 else {}
    )
    sections = {
        "model": {"builder": "meshwright_models.llama:build", "options": options},
        "data": {"train": "random", "sequence_length": length, "document_boundaries": True},
        "batch": {"micro_batch_size": 1, "global_batch": 1},
        "parallel": parallel,
        "train": {"dtype": "float32", "device": "cpu"},
    }
    return resolve(RunConfig.model_validate(sections))


def measure(rank: int, world_size: int, config_json: str, document: int) -> int:
    """Return the peak bytes of this rank's activations in its second step."""
    config = parse(config_json)
    with Observer() as observer:
        source = Documents(config.data.sequence_length, document)
        parts = build(config, open_mesh(grid_of(config.parallel), "cpu"), (source, {}))
        take_step(parts)
        for replica in parts.replicas.values():
            replica.wait_for_weights()
        gc.collect()
        observer.restart()
        before = observer.live_bytes()
        take_step(parts)
    return observer.peak_bytes - before


def compare(pool: RankPool, length: int, cp: int, document: int) -> dict[str, Any]:
    """Measure one process, then each kind of context parallelism; return the report."""

    def run(degree: int, exchange: str, order: str, kv_heads: int) -> int:
        text = config_of(length, degree, exchange, order, kv_heads).model_dump_json()
        return max(pool.run(measure, degree, text, document, timeout_s=TIMEOUT_S))

    alone = {
        kv_heads: run(1, "keys", "zigzag", kv_heads)
        for kv_heads in sorted({way[2] for way in WAYS})
    }
    rows = []
    for exchange, order, kv_heads in WAYS:
        found, of_attention = (
            run(cp, exchange, order, kv_heads),
            2 * length * kv_heads * HEAD_DIM * BYTES,
        )
        groups = num_groups(cp, HEADS, kv_heads)
        keys = (
            0
            if exchange == "heads"
            else of_attention * LAYERS
            if groups == 1
            else 2 * of_attention // groups
        )
        whole = alone[kv_heads] / cp
        shares = {"share_x_cp": found / whole, "rest_x_cp": (found - keys) / whole}
        names = {
            "exchange": exchange,
            "order": order,
            "kv_heads": kv_heads,
            "one_process": alone[kv_heads],
        }
        rows.append(names | {"bytes": found, "groups": groups, "gathered_keys": keys} | shares)
    bars = [(row, row["share_x_cp"]) for row in rows]
    problems = [
        f"{row['exchange']}, {row['order']}: {share:.3f}" for row, share in bars if share > BAR
    ]
    return {"length": length, "cp": cp, "rows": rows, "problems": problems}


def main() -> int:
    """Measure, print and write the report; return 1 above the bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--document", type=int, default=1024)
    parser.add_argument(
        "--out", type=Path, help="JSON file (default benchmarks/results/<date>-long-sample.json)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meshwright.tensor_parallel.megatron.load_mappings(torch.device("cpu"))
    console = Console(width=120)
    with RankPool(arguments.cp) as pool:
        found = compare(pool, arguments.length, arguments.cp, arguments.document)
    for row in found["rows"]:
        whole = f"{row['share_x_cp']:.3f} / {found['cp']} of {row['one_process']:,} of one process"
        words = (
            f"bytes on the fullest rank, {whole}; {row['rest_x_cp']:.3f} without"
            f" {row['gathered_keys']:,} of keys"
        )
        start = (
            f"{row['exchange']:6s}{row['order']:10s}{row['kv_heads']} kv heads {row['bytes']:>13,}"
        )
        console.print(f"{start} {words}", highlight=False)
    report = {
        "environment": environment(
            shlex.join(["python", "benchmarks/long_sample.py", *sys.argv[1:]])
        )
    } | found
    return conclude("long-sample", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
