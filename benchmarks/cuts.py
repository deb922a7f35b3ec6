"""Simulated loss from balancing single stages where a rank has several:
that cut into stages against every other.

    python benchmarks/cuts.py

A model has equal blocks between an embedding that costs a twentieth of one and a head of the cost
shown. It is cut in every way (or in 400 random ways if there are more), and the schedule is
simulated with each cut. The table has the steps of partition's cut and of the best, over a step
without bubble and imbalance. Needs no torch; takes half a minute.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from itertools import pairwise

from meshwright.pipeline.plan import partition
from meshwright.schedule.action import Schedule
from meshwright.schedule.analysis import Costs, simulate
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower

CHUNKS = 24
MOST_CUTS = 400
CASES = (
    ("1f1b", 4, 1, 10),
    ("interleaved_1f1b", 2, 3, 10),
    ("interleaved_1f1b", 2, 4, 12),
    ("interleaved_1f1b", 3, 2, 10),
    ("zb_v", 2, 2, 9),
    ("zb_v", 3, 2, 10),
    ("v_half", 3, 2, 10),
)
"""Cases: (schedule, pp, interleave, layers)."""
HEADS = (0.4, 1.0, 2.4)
"""Cost of the head and loss, in blocks."""


def step(schedule: Schedule, costs: Sequence[float], stages: Sequence[range]) -> float:
    """Return the simulated step time, relative to one without bubble and imbalance."""
    times = [sum(costs[layer] for layer in stage) for stage in stages]
    spans = simulate(schedule, [Costs(f=t / 3, b=t * 2 / 3, i=t / 3, w=t / 3) for t in times]).spans
    return max(span.end for span in spans) * schedule.pp / (sum(costs) * CHUNKS)


def main() -> None:
    print(f"{'schedule':18}pp  stages  layers  head  partition's   best   cuts tried")
    for (name, pp, interleave, num_layers), head in itertools.product(CASES, HEADS):
        costs = [0.05, *[1.0] * (num_layers - 2), head]
        schedule = lower(build(name, pp, CHUNKS, interleave))
        ends = list(itertools.combinations(range(1, num_layers), pp * interleave - 1))
        if len(ends) > MOST_CUTS:
            ends = random.Random(1).sample(ends, MOST_CUTS)
        ours = step(schedule, costs, partition(costs, pp * interleave))
        steps = [
            step(schedule, costs, [range(*run) for run in pairwise((0, *cut, num_layers))])
            for cut in ends
        ]
        best = min(ours, *steps)
        print(
            f"{name:18}{pp:2}{pp * interleave:8}{num_layers:8}{head:6}{ours:13.3f}{best:7.3f}{len(ends):13}"
        )


if __name__ == "__main__":
    main()
