"""Cut of layers into contiguous stages that minimises the cost of the most expensive stage. Pure:
no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from meshwright.errors import ConfigError


def partition(costs: Sequence[float], num_stages: int, interleave: int = 1) -> list[range]:
    """Cut layers into ``num_stages`` contiguous, non-empty runs,
    so that the largest sum of costs is minimal.

    The result is unique: of equally good cuts it is the one whose last stage takes most layers, and
    the stages before it are cut by the same rule. A remainder thus goes to late stages, which hold
    fewer micro-batches in flight.

        partition([1] * 9, 4)      largest sum 3        0 1 | 2 3 | 4 5 | 6 7 8

    A bound on the most expensive stage is tested by filling stages from the end. The least bound is
    found by bisection (Pinar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D
    partitioning"). Costs are exact fractions: equal layers make equal sums in every position, and
    every rank finds the same cut.

    With several stages on a rank (``num_stages = pp x interleave``) the objective is still the most
    expensive stage. Ranks send and receive stage by stage, and none has more work than
    ``interleave`` times that stage. This bound is not tight where one layer costs more than an
    average stage, because its rank has other stages too: docs/balance.md.

    Args:
        costs: cost of each layer, finite, zero or more.
        interleave: stages per rank; used only in the error message.

    >>> partition([1, 1, 1, 1, 2], 2)
    [range(0, 3), range(3, 5)]

    Raises:
        ConfigError: fewer layers than stages.
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        pp = num_stages // interleave
        of_rank = f" (pp {num_stages // interleave} x interleave {interleave})"
        moves = [f"parallel.pp <= {num_layers // interleave}"] if num_layers >= interleave else []
        fewer = num_layers // pp
        if 1 < fewer < interleave:
            moves.append(f"pipeline.interleave <= {fewer}")
        elif fewer == 1 < interleave:
            moves.append("a schedule of one stage per rank, such as 1f1b")
        raise ConfigError(
            "MW-PIPELINE-002",
            f"{num_layers} layers over {num_stages} stages{of_rank if interleave > 1 else ''}: each"
            " stage needs a layer of its own. Use"
            f" {' or '.join(moves) or 'a model of more layers'}",
        )
    total = _running_totals(costs)
    ends, bound = [num_layers], total[-1]
    for stages_left in range(num_stages, 0, -1):
        bound = _least_bound(total, ends[-1], stages_left, bound)
        ends.append(max(bisect_left(total, total[ends[-1]] - bound), stages_left - 1))
    ends.reverse()
    return [range(start, stop) for start, stop in pairwise(ends)]


def _running_totals(costs: Sequence[float]) -> list[int]:
    """Return the sums of the first 0, 1, .. layers in integer units.

    They are exact, because floats are fractions over powers of two.
    """
    exact = [Fraction(cost) for cost in costs]
    unit = max((cost.denominator for cost in exact), default=1)
    return list(
        accumulate((cost.numerator * (unit // cost.denominator) for cost in exact), initial=0)
    )


def _least_bound(total: list[int], num_layers: int, num_stages: int, known: int) -> int:
    """Return the least stage cost with which ``num_stages`` stages can hold the first
    ``num_layers`` layers.

    ``known``: an upper bound of the result.
    """
    dearest_layer = max(stop - start for start, stop in pairwise(total[: num_layers + 1]))
    low, high = max(dearest_layer, -(-total[num_layers] // num_stages)), known
    while low < high:
        fits, nearest = _fill(total, num_layers, num_stages, (low + high) // 2)
        if fits:
            high = nearest
        else:
            low = nearest
    return high


def _fill(total: list[int], num_layers: int, num_stages: int, bound: int) -> tuple[bool, int]:
    """Fill stages up to ``bound`` from the end; return (they reach the first layer,
    the next bound that matters).

    The next bound is the largest cost of a stage if they do; else the least with which some stage
    takes one more layer. No layer may cost more than ``bound``.
    """
    end, largest, larger = num_layers, 0, total[num_layers]
    for _ in range(num_stages):
        start = bisect_left(total, total[end] - bound)
        largest = max(largest, total[end] - total[start])
        if start == 0:
            return True, largest
        larger = min(larger, total[end] - total[start - 1])
        end = start
    return False, larger


def partition_explicit(layers_per_stage: Sequence[int], num_layers: int) -> list[range]:
    """Return the stages of the user's own cut: the number of layers of each stage, first to last.

    Raises:
        ConfigError: the numbers do not add up to the layers of the model.
    """
    if sum(layers_per_stage) != num_layers:
        text = " + ".join(map(str, layers_per_stage))
        raise ConfigError(
            "MW-PIPELINE-003",
            f"pipeline.balance = {list(layers_per_stage)}: {text} = {sum(layers_per_stage)}, but"
            f" the model has {num_layers} layers (embedding and head are layers too)",
        )
    return [range(start, stop) for start, stop in pairwise(accumulate(layers_per_stage, initial=0))]
