"""Loss of each optimizer on the text of the demo at equal tokens: three seeds,
at the best learning rate of a sweep.

    python benchmarks/optimizers.py --data runs/data/stdlib [--out FILE]

A small Llama trains on the text that `make demo` prepares, through the framework's own steps, in
one process. For each optimizer every learning rate of RATES is tried with the first seed. The best
one by validation loss runs with the other seeds. Schedule-free AdamW has a constant learning rate,
all others a cosine to a tenth of the peak; all warm up.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

import meshwright

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 192,
}
LENGTH, BATCH, STEPS, WARMUP, SEEDS = 64, 16, 200, 20, (1, 2, 3)
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (1e-3, 3e-3, 1e-2),
    "adamw8bit": (1e-3, 3e-3, 1e-2),
    "muon": (3e-3, 1e-2, 3e-2),
    "lion": (3e-4, 1e-3, 3e-3),
    "schedule_free_adamw": (3e-3, 1e-2, 3e-2),
    "adafactor": (3e-2, 1e-1, 3e-1),
}
OWN: dict[str, dict[str, Any]] = {
    "adamw8bit": {"block_size": 64},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.3},
    "schedule_free_adamw": {"schedule": "constant", "min_learning_rate": 0.0},
}
"""Keys that differ from AdamW's."""


class Outcome(NamedTuple):
    """One run."""

    rate: float
    seed: int
    training: float
    """Mean loss of the last ten steps."""
    validation: float
    seconds: float


def trained(name: str, rate: float, seed: int, data: Path, steps: int) -> Outcome:
    """Train once, and validate after the last step."""
    optimizer = {
        "name": name,
        "learning_rate": rate,
        "min_learning_rate": rate / 10,
        "warmup_steps": WARMUP,
    }
    with tempfile.TemporaryDirectory() as directory:
        config = meshwright.make_config(
            run={"name": "run", "directory": directory, "seed": seed},
            model={"builder": "meshwright_models.llama:build", "options": MODEL},
            data={
                "train": str(data / "train"),
                "validation": str(data / "validation"),
                "sequence_length": LENGTH,
            },
            batch={"micro_batch_size": BATCH, "global_batch": BATCH},
            optimizer=optimizer | OWN.get(name, {}),
            train={"steps": steps, "device": "cpu", "validate_steps": 16},
        )
        start_s = time.perf_counter()
        with meshwright.open_run(config) as run:
            losses = [run.take_step().loss for _ in range(steps)]
            validation = run.validate()
    return Outcome(
        rate, seed, statistics.mean(losses[-10:]), validation, time.perf_counter() - start_s
    )


def measured(name: str, data: Path, steps: int, seeds: Sequence[int]) -> list[Outcome]:
    """Return the runs of the sweep, then those of the other seeds at the best learning rate."""
    sweep = [trained(name, rate, seeds[0], data, steps) for rate in RATES[name]]
    best = min(sweep, key=lambda outcome: outcome.validation)
    return sweep + [trained(name, best.rate, seed, data, steps) for seed in seeds[1:]]


def best_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the runs at the best learning rate, one per seed."""
    first = outcomes[0].seed
    best = min(
        (each for each in outcomes if each.seed == first), key=lambda outcome: outcome.validation
    )
    return [each for each in outcomes if each.rate == best.rate]


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return a line of the markdown table."""
    best = best_of(outcomes)
    losses = [each.validation for each in best]
    swept = ", ".join(
        f"{each.rate:g}: {each.validation:.3f}" for each in outcomes[: len(RATES[name])]
    )
    training = statistics.mean(each.training for each in best)
    spread = f"{statistics.mean(losses):.3f} [{min(losses):.3f} .. {max(losses):.3f}]"
    return f"| `{name}` | {best[0].rate:g} | {spread} | {training:.3f} | {swept} |"


def write(path: Path, found: Mapping[str, Sequence[Outcome]], steps: int, command: str) -> None:
    """Write all runs, with command, versions and date;
    runs of other optimizers in the file stay.
    """
    before = json.loads(path.read_text())["runs"] if path.exists() else {}
    figures = {
        "command": command,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "model": MODEL,
        "tokens": steps * BATCH * LENGTH,
        "steps": steps,
        "keys": OWN,
        "runs": (
            before
            | {name: [each._asdict() for each in outcomes] for name, outcomes in found.items()}
        ),
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    """Measure the chosen optimizers, print the table, and write the runs."""
    parser = argparse.ArgumentParser(description="Compare optimizers on the text of the demo.")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("runs/data/stdlib"),
        help="the folder that `make demo` makes",
    )
    parser.add_argument("--only", choices=RATES, action="append")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = chosen.only or list(RATES)
    command = (
        f"python benchmarks/optimizers.py --steps {chosen.steps} --seeds"
        f" {' '.join(map(str, chosen.seeds))}"
    )
    print(
        "| optimizer | learning rate | validation loss, mean [least .. most] | training loss |"
        " sweep, first seed |"
    )
    print("|---|---|---|---|---|", flush=True)
    found: dict[str, list[Outcome]] = {}
    for name in names:
        found[name] = measured(name, chosen.data, chosen.steps, chosen.seeds)
        print(row(name, found[name]), flush=True)
        if chosen.out is not None:
            write(chosen.out, found, chosen.steps, command)


if __name__ == "__main__":
    main()
