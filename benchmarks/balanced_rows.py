"""Steps whose rows are dealt by work, beside rows by index, on documents of mixed length.

    python benchmarks/balanced_rows.py [--dp N] [--chunks N] [--length N] [--steps N] [--repeats N] [--pp N]
                                       [--zero N]

A corpus of random tokens (seed 0): lognormal documents, median ``length / 16``, with a long tail. The same
configuration trains in turns, index work, work index, ...; each run is a process of its own. A ratio
compares two runs next to each other: step time by work over step time by index, medians over the
steps after the first two. Losses must agree. The keys of the busiest replica over the mean are those
of the same steps.

Before, the machine is calibrated (`meshwright calibrate`), and the ratio is predicted as `meshwright
plan` does (planner/row_work.py), from the document starts of the first steps.

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

from meshwright.config import load, resolve
from meshwright_plan.commands.plans import execution_options
from meshwright_plan.planner.choice import choice_of
from meshwright_plan.planner.hardware import read_hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import evaluate
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.row_work import DealtTimes, row_times

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
pp = {pp}
zero = {zero}
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


def run(*words: str) -> None:
    """Run a command of meshwright with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshwright_launch", *words]
    subprocess.run(command, check=True, capture_output=True, env=environment)


def train(file: Path) -> tuple[list[float], list[float]]:
    """Train in processes of their own; return the seconds and the losses of the steps."""
    run("train", str(file))
    lines = (file.parent / "runs" / file.stem / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    shutil.rmtree(file.parent / "runs")
    return [line["perf/step_s"] for line in records], [line["train/loss"] for line in records]


def predict(file: Path, hardware: Path) -> DealtTimes:
    """Predict the step times on the calibrated machine, as ``meshwright plan`` does."""
    config, machine = resolve(load(str(file), [])), read_hardware(str(hardware))
    cache = ModelCache(config, execution_options(config.train, machine))
    of = evaluate(cache, machine, config, choice_of(config))
    found = row_times(cache, PerformanceModel.of(machine), of)
    assert found is not None
    return found


def write_configs(folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Write the corpus and one configuration for each way of dealing; return their files."""
    rows = options.dp * options.chunks
    write_corpus(folder / "mixed", options.length, options.length * rows * (options.steps + 2))
    found = {}
    for balance in ("index", "work"):
        numbers = {name: getattr(options, name) for name in ("length", "dp", "pp", "zero", "steps")}
        paths = {"runs": folder / "runs", "corpus": folder / "mixed"}
        found[balance] = folder / f"{balance}.toml"
        found[balance].write_text(
            CONFIG.format(balance=balance, seed=SEED, vocab=VOCAB, rows=rows, **numbers, **paths)
        )
    return found


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    seconds: dict[str, list[list[float]]] = {"index": [], "work": []}
    ratios, worst = [], 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_configs(folder, options)
        run("calibrate", "--ranks", str(options.dp * options.pp), "--out", str(folder / "cpu.toml"))
        predicted = predict(files["index"], folder / "cpu.toml")
        for repeat in range(options.repeats):
            losses: dict[str, list[float]] = {}
            for balance in ("index", "work") if repeat % 2 == 0 else ("work", "index"):
                times, losses[balance] = train(files[balance])
                seconds[balance].append(times[WARMUP:])
            pairs = zip(losses["index"], losses["work"], strict=True)
            worst = max(worst, *(abs(a - b) / abs(a) for a, b in pairs))
            index_s, work_s = (statistics.median(each[-1]) for each in seconds.values())
            ratios.append(work_s / index_s)
            print(f"index {index_s:.3f} s  work {work_s:.3f} s  {ratios[-1]:.3f}", flush=True)
    print(
        f"step time by work / by index: median {statistics.median(ratios):.3f}"
        f" [{min(ratios):.3f} .. {max(ratios):.3f}]; losses differ by at most {worst:.1e}"
    )
    report(predicted, seconds)
    return 1 if worst > 1e-5 or statistics.median(ratios) > 1 else 0


def report(predicted: DealtTimes, seconds: dict[str, list[list[float]]]) -> None:
    """Print the prediction beside the measurement, over the steps that both have.

    Measured is the fastest repeat of each step: its rows are the same in all of them.
    """
    measured = {
        name: [min(step) for step in zip(*repeats, strict=True)]
        for name, repeats in seconds.items()
    }
    expected = {name: steps[WARMUP:] for name, steps in predicted.seconds.items()}
    for name, steps in expected.items():
        excess = statistics.fmean(predicted.excess[name][WARMUP:])
        found_s = statistics.fmean(measured[name][: len(steps)])
        print(
            f"by {name:5}  busiest replica {excess:5.1%} over the mean; predicted"
            f" {statistics.fmean(steps):.3f} s, measured {found_s:.3f} s"
        )
    ratio = statistics.fmean(expected["work"]) / statistics.fmean(expected["index"])
    number = len(expected["index"])
    by_work, by_index = (sum(measured[name][:number]) for name in ("work", "index"))
    found = by_work / by_index
    print(f"by work / by index: predicted {ratio:.3f}, measured {found:.3f} ({ratio - found:+.3f})")


if __name__ == "__main__":
    sys.exit(main())
