"""Steps whose rows are dealt by work, beside rows by index, on documents of mixed length.

    python benchmarks/balanced_rows.py [--dp N] [--chunks N] [--length N] [--steps N] [--repeats N]

A corpus of random tokens (seed 0): lognormal documents, median ``length / 16``, with a long tail. The same
configuration trains in turns, index work, work index, ...; each run is a process of its own. A ratio
compares two runs next to each other: step time by work over step time by index, medians over the
steps after the first two. Losses must agree. The keys of the busiest replica over the mean are those
of the same steps.

Exit code 1: a loss differs by more than 1e-5, or rows by work take longer in the median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from meshwright.data.causal import CorpusSource
from meshwright.data.corpus import Corpus, DocumentRules
from meshwright.data.order import SampleOrder
from meshwright.data.work import by_index, deal, replica_excess

VOCAB, SEED = 256, 1234
WARMUP = 2
CONFIG = """
[run]
name = "{balance}"
directory = "{runs}"
seed = {seed}
[model]
builder = "meshwright_models.llama:build"
[model.options]
vocab_size = {vocab}
hidden_size = 128
num_layers = 4
num_heads = 4
num_kv_heads = 4
ffn_size = 256
max_sequence_length = {length}
[data]
train = "{corpus}"
sequence_length = {length}
document_boundaries = true
[batch]
micro_batch_size = 1
global_batch = {rows}
balance = "{balance}"
[parallel]
dp = {dp}
[optimizer]
learning_rate = 1e-3
[train]
steps = {steps}
device = "cpu"
[checkpoint]
every = 0
"""


def write_corpus(prefix: Path, length: int, num_tokens: int) -> None:
    """Write documents of mixed length."""
    draw, tokens = random.Random(0), torch.Generator().manual_seed(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    written = 0
    while written < num_tokens:
        size = min(2 * length, max(2, round(length / 16 * draw.lognormvariate(0, 2.0))))
        builder.add_document(torch.randint(VOCAB, (size,), generator=tokens), [size])
        written += size
    builder.finalize(f"{prefix}.idx")


def train(config: str, folder: Path, balance: str) -> tuple[float, list[float]]:
    """Train in a process of its own; return the median step time and the losses."""
    file = folder / f"{balance}.toml"
    file.write_text(config)
    command = [sys.executable, "-m", "meshwright_launch", "train", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    lines = (folder / "runs" / balance / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    times = [record["perf/step_s"] for record in records][WARMUP:]
    return statistics.median(times), [record["train/loss"] for record in records]


def excesses(prefix: Path, length: int, dp: int, chunks: int, steps: int) -> dict[str, float]:
    """Return the mean excess of the busiest replica's keys, by way of dealing."""
    corpus = Corpus(prefix, length, rules=DocumentRules(boundaries=True))
    source = CorpusSource(corpus, SampleOrder(corpus.num_samples, SEED))
    rows, found = dp * chunks, {"index": 0.0, "work": 0.0}
    for step in range(WARMUP, steps):
        work = source.work(range(step * rows, (step + 1) * rows))
        found["index"] += replica_excess(work, by_index(rows, dp, chunks))
        found["work"] += replica_excess(work, deal(work, dp, chunks, 1))
    return {name: total / (steps - WARMUP) for name, total in found.items()}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    ratios, worst = [], 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix, rows = folder / "mixed", options.dp * options.chunks
        write_corpus(prefix, options.length, options.length * rows * (options.steps + 2))
        for repeat in range(options.repeats):
            times: dict[str, float] = {}
            losses: dict[str, list[float]] = {}
            for balance in ("index", "work") if repeat % 2 == 0 else ("work", "index"):
                config = CONFIG.format(
                    balance=balance,
                    runs=folder / "runs",
                    corpus=prefix,
                    seed=SEED,
                    vocab=VOCAB,
                    rows=rows,
                    length=options.length,
                    dp=options.dp,
                    steps=options.steps,
                )
                times[balance], losses[balance] = train(config, folder, balance)
                shutil.rmtree(folder / "runs")
            pairs = zip(losses["index"], losses["work"], strict=True)
            worst = max(worst, *(abs(a - b) / abs(a) for a, b in pairs))
            ratios.append(times["work"] / times["index"])
            print(f"index {times['index']:.3f} s  work {times['work']:.3f} s  {ratios[-1]:.3f}")
        found = excesses(prefix, options.length, options.dp, options.chunks, options.steps)
    print(
        f"keys of the busiest of {options.dp} replicas over the mean: by index"
        f" {found['index']:.1%}, by work {found['work']:.1%}\n"
        f"step time by work / by index: median {statistics.median(ratios):.3f}"
        f" [{min(ratios):.3f} .. {max(ratios):.3f}]; losses differ by at most {worst:.1e}"
    )
    return 1 if worst > 1e-5 or statistics.median(ratios) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
