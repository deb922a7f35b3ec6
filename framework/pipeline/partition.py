"""Layers + costs -> contiguous stages whose dearest one is as cheap as possible. Pure: no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from meshwright.errors import ConfigError


def partition(costs: Sequence[float], num_stages: int, interleave: int = 1) -> list[range]:
    """Cut layers into ``num_stages`` contiguous, non-empty runs; the largest sum of costs is minimal.

    Unique: of the cuts that are equally good, the one whose last stage takes most layers, and the stages before it are
    cut by the same rule. What is left over then weighs on late stages, which hold fewer micro-batches in flight.

        partition([1] * 9, 4)      dearest stage 3      0 1 | 2 3 | 4 5 | 6 7 8

    Whether a bound on the dearest stage can be kept is seen by filling stages from the end; the least that can be is
    found by halving (Pinar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning"). Costs are
    counted as exact fractions: equal layers make equal sums wherever they stand, and every rank finds the same cut.

    With several stages on a rank (``num_stages = pp x interleave``) it is still the single stage that counts: ranks
    hand on and take stage by stage, and none has more to do than ``interleave`` dearest stages. Not the whole truth
    where one layer is dearer than a stage should be, as its rank has other stages too: docs/balance.md.

    Args:
        costs: of each layer, finite, zero or more.
        interleave: stages of a rank; for the words of the error only.

    >>> partition([1, 1, 1, 1, 2], 2)
    [range(0, 3), range(3, 5)]

    Raises:
        ConfigError: fewer layers than stages.
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        pp, of_rank = num_stages // interleave, f" (pp {num_stages // interleave} x interleave {interleave})"
        moves = [f"parallel.pp <= {num_layers // interleave}"] if num_layers >= interleave else []
        fewer = num_layers // pp
        if 1 < fewer < interleave:
            moves.append(f"pipeline.interleave <= {fewer}")
        elif fewer == 1 < interleave:
            moves.append("a schedule of one stage per rank, such as 1f1b")
        raise ConfigError(
            f"{num_layers} layers over {num_stages} stages{of_rank if interleave > 1 else ''}: each stage needs a "
            f"layer of its own. Use {' or '.join(moves) or 'a model of more layers'}"
        )
    total = _running_totals(costs)
    ends, bound = [num_layers], total[-1]
    for stages_left in range(num_stages, 0, -1):
        bound = _least_bound(total, ends[-1], stages_left, bound)
        ends.append(max(bisect_left(total, total[ends[-1]] - bound), stages_left - 1))
    ends.reverse()
    return [range(start, stop) for start, stop in pairwise(ends)]


def _running_totals(costs: Sequence[float]) -> list[int]:
    """Sums of the first 0, 1, .. layers in whole units: floats are fractions over powers of two, nothing is lost."""
    exact = [Fraction(cost) for cost in costs]
    unit = max((cost.denominator for cost in exact), default=1)
    return list(accumulate((cost.numerator * (unit // cost.denominator) for cost in exact), initial=0))


def _least_bound(total: list[int], num_layers: int, num_stages: int, known: int) -> int:
    """The smallest bound that ``num_stages`` stages over the first layers keep; ``known`` is one that they do."""
    dearest_layer = max(stop - start for start, stop in pairwise(total[: num_layers + 1]))
    low, high = max(dearest_layer, -(-total[num_layers] // num_stages)), known
    while low < high:
        middle = (low + high) // 2
        if _keeps(total, num_layers, num_stages, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _keeps(total: list[int], num_layers: int, num_stages: int, bound: int) -> bool:
    """Whether stages filled up to the bound from the end reach the first layer. No layer is dearer than the bound."""
    end = num_layers
    for _ in range(num_stages):
        end = bisect_left(total, total[end] - bound)
        if end == 0:
            return True
    return False


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
