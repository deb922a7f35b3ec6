"""Reference losses: short runs of the shipped configurations, recorded bit for bit,
to compare two versions.

    python benchmarks/reference_losses.py --out FILE             train them all (7 minutes on 2 cores) and write FILE
    python benchmarks/reference_losses.py --against FILE         train them all and compare with FILE; exit 1: not equal

A change that should not alter numbers gives equal losses, gradient norms and validation losses,
hexadecimal digit by digit, on the same machine with the same versions of torch. The text of ``make
demo`` must have been prepared. ``benchmarks/results/2026-11-23-reference-losses.json`` was written
before the code moved into core, services and tools, ``2026-11-27-reference-losses.json`` after it,
on another processor (CHANGELOG.md has what differs on one machine).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

DEMO = "configs/demo.toml"
RUNS = {
    "demo": (DEMO,),
    "tp4": (DEMO, "--train.steps=40", "--parallel.tp=4", "--parallel.pp=1"),
    "pp4": (
        DEMO,
        "--train.steps=40",
        "--parallel.pp=4",
        "--parallel.tp=1",
        "--pipeline.schedule=gpipe",
    ),
    "dp8": (
        DEMO,
        "--train.steps=40",
        "--parallel.dp=8",
        "--parallel.pp=1",
        "--parallel.tp=1",
        "--parallel.zero=3",
    ),
    "zbv": (DEMO, "--train.steps=40", "--pipeline.schedule=zb_v"),
    "t5": ("configs/t5-demo.toml",),
    "vision": ("examples/vision/config.toml",),
}
METRICS = ("train/loss", "train/grad_norm", "validation/loss")


def train(name: str, words: tuple[str, ...], folder: Path) -> list[list[str | None]]:
    """Train one run from its beginning; return the hexadecimal METRICS of each step."""
    run = f"reference-{name}"
    shutil.rmtree(folder / run, ignore_errors=True)
    command = [
        "meshwright",
        "train",
        *words,
        f"--run.name={run}",
        f"--run.directory={folder}",
        "--tracking.wandb=off",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_losses(folder / run / "metrics.jsonl")


def read_losses(metrics: Path) -> list[list[str | None]]:
    """Return the hexadecimal METRICS of each step of a run;
    None where a step has no such metric.
    """
    steps = map(json.loads, metrics.read_text().splitlines())
    return [[float(step[key]).hex() if key in step else None for key in METRICS] for step in steps]


def differences(
    ours: dict[str, list[list[str | None]]], theirs: dict[str, list[list[str | None]]]
) -> list[str]:
    """Return one line for each run that is not equal, with the first step that differs."""
    found = []
    for name in RUNS:
        if ours[name] != theirs[name]:
            pairs = zip(ours[name], theirs[name], strict=False)
            step = next((i for i, (a, b) in enumerate(pairs, start=1) if a != b), len(ours[name]))
            found.append(
                f"{name}: step {step} differs: {ours[name][step - 1]}, was {theirs[name][step - 1]}"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write the losses")
    parser.add_argument("--against", type=Path, help="losses to compare with")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs"), help="where the runs are kept"
    )
    arguments = parser.parse_args()
    losses = {name: train(name, words, arguments.directory) for name, words in RUNS.items()}
    if arguments.out:
        arguments.out.write_text(json.dumps(losses) + "\n")
    if arguments.against is None:
        return 0
    found = differences(losses, json.loads(arguments.against.read_text()))
    print("\n".join(found) or f"all {len(RUNS)} runs are equal, digit by digit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
