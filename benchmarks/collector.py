"""Pauses of Python's garbage collector in training steps: left to Python,
and run every 50 steps (``train.gc_every``).

    python benchmarks/collector.py [BLOCKS [TURNS [STEPS]]]

One process trains the same GPT of BLOCKS small blocks for STEPS steps, in turns A B, B A, ...
Printed for both, without each turn's first step: collections of the oldest generation, the CPU time
of all collections per step, the longest one, and median, 99th percentile and maximum of the step's
CPU time.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

import meshwright
from meshwright.parts import Observer, Parts


def tokens(split: str) -> list[tuple[Tensor, Tensor]]:
    """Return 64 samples of 16 tokens and their successors."""
    ids = torch.randint(64, (64, 17), generator=torch.Generator().manual_seed(0))
    return [(row[:-1], row[1:]) for row in ids]


class Pauses(Observer):
    """Times collections by ``gc.callbacks`` and steps by the process's CPU clock,
    from the second step on.
    """

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self.steps_s: list[float] = []
        self.oldest, self._begin_s, self._step_s = 0, 0.0, 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._begin_s = time.process_time()
        else:
            self.pauses_s.append(time.process_time() - self._begin_s)
            self.oldest += info["generation"] == 2

    def before_step(self, parts: Parts) -> None:
        """End a step, with the observers after it, and begin the next."""
        now = time.process_time()
        if self in gc.callbacks:
            self.steps_s.append(now - self._step_s)
        elif parts.state.step == 1:
            gc.callbacks.append(self)
        self._step_s = now

    def after_training(self, parts: Parts) -> None:
        gc.callbacks.remove(self)


def train(every: int, blocks: int, steps: int) -> Pauses:
    """Train anew in a directory of its own."""
    pauses = Pauses()
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_layers": blocks,
        "num_heads": 2,
        "max_sequence_length": 16,
    }
    with tempfile.TemporaryDirectory() as directory:
        config = meshwright.make_config(
            run={"name": "own", "directory": directory},
            model={"builder": "meshwright_models.gpt2:build", "options": sizes},
            data={"train": "", "builder": "collector:tokens"},
            batch={"micro_batch_size": 1, "chunks": 8},
            train={"steps": steps + 2, "device": "cpu", "gc_every": every},
            tracking={"console": False},
        )
        meshwright.run_training(config, [pauses])
    return pauses


def main(blocks: int = 4, turns: int = 3, steps: int = 300) -> None:
    """Run both in turns, and print a line for each."""
    found: dict[int, list[Pauses]] = {0: [], 50: []}
    for index in range(turns):
        for every in (0, 50) if index % 2 == 0 else (50, 0):
            found[every].append(train(every, blocks, steps))
    for every, runs in found.items():
        pauses = [each for run in runs for each in run.pauses_s]
        times = sorted(each for run in runs for each in run.steps_s)
        name = f"Every {every} steps" if every else "Python alone"
        print(
            f"{name:15} {sum(run.oldest for run in runs)} full collections,"
            f" {1e6 * sum(pauses) / len(times):.0f} us per step in all, longest"
            f" {1e3 * max(pauses, default=0):.2f} ms; steps of {1e3 * statistics.median(times):.1f}"
            f" ms, 99 % {1e3 * times[int(0.99 * len(times))]:.1f}, longest {1e3 * times[-1]:.1f}"
        )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
