"""Steps whose micro-batches are trimmed (``batch.padding = "trim"``), beside steps on whole rows.

    python benchmarks/trimmed_rows.py [--dp N] [--pp N] [--chunks N] [--length N] [--steps N] [--repeats N]

A dataset of one conversation a row, padded to ``length``: lognormal lengths, median ``length / 4``
(seed 0). The same configuration trains in turns, keep trim, trim keep, ...; each run is a process of
its own. Of each step the fastest repeat counts: its rows are the same in all of them. The ratio is
that of the sums over the steps after the first two. Losses must agree.

Exit code 1: a loss differs by more than 1e-5, or trimmed steps take longer.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from balanced_rows import SEED, WARMUP, train
from torch import Tensor

VOCAB = 256
CONFIG = """
[run]
name = "{padding}"
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
builder = "trimmed_rows:conversations"
options = {{ length = {length} }}
[batch]
micro_batch_size = 1
global_batch = {rows}
padding = "{padding}"
[parallel]
dp = {dp}
pp = {pp}
[optimizer]
learning_rate = 1e-3
[train]
steps = {steps}
device = "cpu"
[checkpoint]
every = 0
"""


class Conversations:
    """Rows of random tokens with labels up to the end of a conversation."""

    def __init__(self, length: int) -> None:
        self.length = length
        draw = random.Random(0)
        self.used = [
            min(length, max(8, round(length / 4 * draw.lognormvariate(0, 0.8))))
            for _ in range(1024)
        ]

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self.used)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels, (S,) each."""
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (self.length + 1,), generator=generator)
        ids[self.used[index] :] = 0
        labels = ids[1:].clone()
        labels[self.used[index] - 1 :] = -100
        return ids[:-1], labels


def conversations(split: str, length: int) -> Conversations | None:
    """Return the dataset, for ``data.builder``; no validation."""
    return Conversations(length) if split == "train" else None


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    # the runs import the dataset from here
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    )
    seconds: dict[str, list[list[float]]] = {"keep": [], "trim": []}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for repeat in range(options.repeats):
            for padding in ("keep", "trim") if repeat % 2 == 0 else ("trim", "keep"):
                numbers = {key: getattr(options, key) for key in ("dp", "pp", "length", "steps")}
                file = folder / f"{padding}.toml"
                file.write_text(
                    CONFIG.format(
                        padding=padding,
                        runs=folder / "runs",
                        seed=SEED,
                        vocab=VOCAB,
                        rows=options.dp * options.chunks,
                        **numbers,
                    )
                )
                times, losses[padding] = train(file)
                seconds[padding].append(times[WARMUP:])
    used = statistics.fmean(Conversations(options.length).used) / options.length
    keep_s, trim_s = (sum(map(min, zip(*seconds[each], strict=True))) for each in ("keep", "trim"))
    pairs = zip(losses["keep"], losses["trim"], strict=True)
    worst = max(abs(a - b) / abs(a) for a, b in pairs)
    print(
        f"rows are {used:.1%} conversation; steps of whole rows {keep_s:.2f} s, trimmed"
        f" {trim_s:.2f} s: {trim_s / keep_s:.3f}; losses differ by at most {worst:.1e}"
    )
    return 1 if worst > 1e-5 or trim_s > keep_s else 0


if __name__ == "__main__":
    sys.exit(main())
