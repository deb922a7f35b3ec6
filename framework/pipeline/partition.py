"""Layers + costs -> contiguous stages whose dearest one is as cheap as possible. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from framework.errors import ConfigError


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut layers into ``num_stages`` contiguous, non-empty runs; the largest sum of costs is minimal.

    Among equally good cuts the later stages get fewer layers of the rest, so that the result is unique. Dynamic
    programme over (stages, layers): best[k][n] = min over m of max(best[k-1][m], cost of layers m..n).

    >>> partition([1, 1, 1, 1, 2], 2)
    [range(0, 3), range(3, 5)]

    Raises:
        ConfigError: fewer layers than stages.
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers over {num_stages} stages: each stage needs a layer of its own. "
            f"Use parallel.pp <= {num_layers}"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    infinite = float("inf")
    best = [[infinite] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for k in range(1, num_stages + 1):
        for n in range(k, num_layers + 1):
            for m in range(k - 1, n):
                worst = max(best[k - 1][m], total[n] - total[m])
                if worst < best[k][n]:
                    best[k][n], cut[k][n] = worst, m
    ends = [num_layers]
    for k in range(num_stages, 0, -1):
        ends.append(cut[k][ends[-1]])
    ends.reverse()
    return [range(start, stop) for start, stop in pairwise(ends)]


def partition_explicit(layers_per_stage: Sequence[int], num_layers: int) -> list[range]:
    """The user's own cut: the number of layers of each stage, first to last."""
    if sum(layers_per_stage) != num_layers:
        text = " + ".join(map(str, layers_per_stage))
        raise ConfigError(
            f"pipeline.balance = {list(layers_per_stage)}: {text} = {sum(layers_per_stage)}, but the model has "
            f"{num_layers} layers (embedding and head are layers too)"
        )
    stages, start = [], 0
    for count in layers_per_stage:
        stages.append(range(start, start + count))
        start += count
    return stages
