"""Balance of attention over context-parallel ranks: keys of the busiest rank over the mean,
for mixes of documents.

    python benchmarks/context_balance.py [--cp N] [--length N] [--samples N]

Samples of ``length`` tokens are filled with documents of drawn lengths (seed 0); the last of a
sample is cut. The step waits for the busiest rank at each attention. A percentage is (busiest -
mean) / mean over all samples, each a micro-batch. Pure arithmetic: no model, no process.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshwright.context_parallel.balance import batch_imbalance
from meshwright.context_parallel.order import ORDERS

Draw = Callable[[random.Random, int], int]
"""Length of the next document, from the place where it begins."""


def _lognormal(median: float, sigma: float) -> Draw:
    return lambda rng, place: max(1, round(median * rng.lognormvariate(0, sigma)))


MIXES: dict[str, Callable[[int], Draw]] = {
    "one document": lambda length: lambda rng, place: length,
    "pages (median 700 tokens)": lambda length: _lognormal(700, 1.0),
    "pages and books (median 2,000, long tail)": lambda length: _lognormal(2_000, 2.0),
    "half a sample, then pages": lambda length: (
        lambda rng, place: length // 2 if place == 0 else _lognormal(700, 1.0)(rng, place)
    ),
    "code files, then a repository": lambda length: (
        lambda rng, place: _lognormal(300, 1.2)(rng, place) if place < length // 3 else length
    ),
}
"""Name -> the documents of samples of a length."""


def starts_of(draw: Draw, length: int, rng: random.Random) -> NDArray[np.bool_]:
    """Return where the documents of one sample begin, (S,)."""
    starts, place = np.zeros(length, dtype=np.bool_), 0
    while place < length:
        starts[place] = True
        place += draw(rng, place)
    return starts


def balance(length: int, cp: int, samples: int) -> dict[str, dict[str, float]]:
    """Return the imbalance of each order for each mix."""
    found = {}
    for name, mix in MIXES.items():
        rng = random.Random(0)
        batches = [[starts_of(mix(length), length, rng)] for _ in range(samples)]
        found[name] = {order: batch_imbalance(order, cp, batches) for order in ORDERS}
    return found


def table(length: int, cp: int, samples: int) -> list[str]:
    """Return the imbalances as lines of Markdown."""
    columns = list(ORDERS)
    lines = [f"| documents | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in balance(length, cp, samples).items():
        lines.append(f"| {name} | " + " | ".join(f"{row[order]:.1%}" for order in columns) + " |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--samples", type=int, default=4)
    arguments = parser.parse_args()
    print("\n".join(table(arguments.length, arguments.cp, arguments.samples)))


if __name__ == "__main__":
    main()
