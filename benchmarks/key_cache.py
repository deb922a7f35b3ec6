"""Generation with a key-value cache beside generation that runs the whole row for every token.

    python benchmarks/key_cache.py RUN [--tokens N] [--prompt N] [--repeats N]

In one process and float32, by a trained model. Both continue the same row of random tokens greedily, in
turns; a ratio compares two turns next to each other, and the median is printed. A run of one step
does, with the sizes that are wanted:

    meshwright train configs/demo.toml --train.steps=1 --optimizer.warmup_steps=0 --data.sequence_length=1024 ...

Exit code 1: the tokens differ, or the cache is no faster in the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor

import meshwright.inference.rows
from meshwright.inference.generation import NewTokens, continue_rows
from meshwright.inference.load import config_for, locate
from meshwright.inference.rows import RowForward, open_rows
from meshwright.inference.sample import SAME_TEXT, check
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh


def open_run(run: Path) -> tuple[RowForward, int]:
    """Open the newest model of a run; return it and the tokens of its tokenizer."""
    place = locate(run, None)
    alone = ("--parallel.pp=1", "--parallel.tp=1")
    config = check(config_for(place, (), "sample", defaults=(*SAME_TEXT, *alone)), 1, 1)
    tokenizer = Tokenizer.from_file(str(config.data.tokenizer))
    forward, _ = open_rows(config, open_mesh(Grid(), "cpu"), place, tokenizer, None, set())
    return forward, tokenizer.get_vocab_size()


def generate(
    forward: RowForward, row: list[int], tokens: int, vocabulary: int
) -> tuple[float, list[NewTokens]]:
    """Continue the row; return the seconds and the tokens."""

    def likeliest(due: Sequence[int], logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    start_s = time.perf_counter()
    found = continue_rows(forward, [row], [tokens], (), likeliest, vocabulary)
    return time.perf_counter() - start_s, found


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    cached, vocabulary = open_run(options.run)
    if cached.cache is None:
        print("this model runs without a cache", file=sys.stderr)
        return 2
    with patch.object(meshwright.inference.rows, "_cached", lambda *_: False):
        whole, _ = open_run(options.run)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(vocabulary, (options.prompt,), generator=generator).tolist()
    ratios, is_equal = [], True
    for repeat in range(options.repeats):
        turns = [("cache", cached), ("whole", whole)]
        times, texts = {}, {}
        for name, forward in turns if repeat % 2 == 0 else reversed(turns):
            times[name], texts[name] = generate(forward, row, options.tokens, vocabulary)
        is_equal &= texts["cache"] == texts["whole"]
        ratios.append(times["cache"] / times["whole"])
        print(f"cache {times['cache']:.3f} s  whole {times['whole']:.3f} s  {ratios[-1]:.3f}")
    median = statistics.median(ratios)
    print(
        f"{options.tokens} tokens after {options.prompt}: time with the cache / without, median"
        f" {median:.3f} [{min(ratios):.3f} .. {max(ratios):.3f}];"
        f" {'equal' if is_equal else 'DIFFERENT'} tokens"
    )
    return 0 if is_equal and median < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
