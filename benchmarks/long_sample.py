"""Memory of one training step on a sample of 131,072 tokens: one process against context-parallel ranks, on CPU.

    python benchmarks/long_sample.py [--length N] [--cp N] [--document N] [--out FILE]

A Llama of 2 layers, 8 heads of 4 features, in float32; documents of 1,024 tokens, so that the attention of a CPU takes
seconds. Live bytes of a rank are those of all storages that any tensor operation has made and that still live; its
activations are their peak in a second step less those before the step. The bar is 1.15 / cp of one process'
activations, for the exchange of keys with the keys and values that it keeps: 2 S G d b bytes an attention.
Exit code 1: a rank above it.
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
from meshwright.launch.pool import RankPool
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright.tools.dryrun.fake_step import grid_of

BAR = 1.15
LAYERS, HEADS, HEAD_DIM, VOCAB = 2, 8, 4, 64
TIMEOUT_S = 1800.0
WAYS = (("heads", "zigzag"), ("keys", "documents"))
"""Exchanges and orders that are measured."""


class Documents(NamedTuple):
    """Samples of drawn tokens with documents of one length. A :class:`meshwright.data.sources.Source`."""

    length: int
    document: int

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the tokens and document starts of these samples, and labels, each (B, S)."""
        drawn = torch.Generator().manual_seed(indices[0])
        tokens, labels = (torch.randint(VOCAB, (len(indices), self.length), generator=drawn) for _ in range(2))
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        starts[:, :: self.document] = True
        return {"tokens": tokens, "starts": starts}, labels


def config_of(length: int, cp: int, exchange: str, order: str) -> RunConfig:
    """Return the run of one sample per step."""
    size = HEADS * HEAD_DIM
    options = {"vocab_size": VOCAB, "hidden_size": size, "num_layers": LAYERS, "num_heads": HEADS}
    options |= {"num_kv_heads": HEADS, "ffn_size": 2 * size, "max_sequence_length": length}
    parallel = {"dp": 1, "cp": cp} | ({"cp_exchange": exchange, "cp_order": order} if cp > 1 else {})
    sections = {
        "model": {"builder": "meshwright.models.llama:build", "options": options},
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
        parts = build(config, open_mesh(grid_of(config), "cpu"), (source, None))
        take_step(parts)
        for replica in parts.replicas.values():
            replica.wait_for_weights()
        gc.collect()
        observer.restart()
        before = observer.live_bytes()
        take_step(parts)
    return observer.peak_bytes - before


def compare(pool: RankPool, length: int, cp: int, document: int) -> dict[str, Any]:
    """Measure one process and all ways; return the report."""

    def run(degree: int, exchange: str, order: str) -> int:
        text = config_of(length, degree, exchange, order).model_dump_json()
        return max(pool.run(measure, degree, text, document, timeout_s=TIMEOUT_S))

    alone = run(1, "keys", "zigzag")
    kept = LAYERS * 2 * length * HEADS * HEAD_DIM * torch.float32.itemsize
    rows = []
    for exchange, order in WAYS:
        found, keys = run(cp, exchange, order), kept if exchange == "keys" else 0
        share = (found - keys) / alone * cp
        rows.append({"exchange": exchange, "order": order, "bytes": found, "kept_keys": keys, "share_x_cp": share})
    problems = [
        f"{row['exchange']}, {row['order']}: {row['share_x_cp']:.3f}" for row in rows if row["share_x_cp"] > BAR
    ]
    return {"length": length, "cp": cp, "one_process": alone, "rows": rows, "problems": problems}


def main() -> int:
    """Measure, print and write the report; return 1 above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--document", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/<date>-long-sample.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meshwright.tensor_parallel.megatron.load_mappings(torch.device("cpu"))
    console = Console(width=120)
    with RankPool(arguments.cp) as pool:
        found = compare(pool, arguments.length, arguments.cp, arguments.document)
    console.print(f"one process {found['one_process']:>15,} bytes of activations", highlight=False)
    for row in found["rows"]:
        rest = f"the rest is {row['share_x_cp']:.3f} / {found['cp']} of one process'"
        words = f"bytes on the fullest rank, {row['kept_keys']:,} of them keys and values of all tokens; {rest}"
        console.print(f"{row['exchange']:6s}{row['order']:10s}{row['bytes']:>11,} {words}", highlight=False)
    report = {"environment": environment(shlex.join(["python", "benchmarks/long_sample.py", *sys.argv[1:]]))} | found
    return conclude("long-sample", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
