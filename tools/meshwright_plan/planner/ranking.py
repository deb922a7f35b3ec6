"""Ranking of layouts within the prediction's error: ties, the simplest of a tie, near-duplicates.

TIE_SHARE                lead that is hardly better than chance        a tie, which goes to the simplest layout
same degrees and a tie                                                 one line, of the simplest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.config import V_SCHEDULES
from meshwright_plan.planner.choice import Choice
from meshwright_plan.planner.context import context_words
from meshwright_plan.planner.plan import RankedLayout

TIE_SHARE = 0.02
"""Predicted lead below which the order of two layouts is hardly better than chance: right in 69 %
of the pairs of published runs of one model on one cluster; 84 % from 2 to 4 %, 95 % from 4 to 10 %,
96 % from 10 to 20 %.
"""
SPLIT_SCHEDULES = ("zb_h1", "zb_h2", *V_SCHEDULES)


class Line(NamedTuple):
    """One line of a ranking: a layout, and the near-duplicates that it stands for."""

    layout: RankedLayout
    alike: tuple[RankedLayout, ...]

    @property
    def fastest_s(self) -> float:
        """Predicted seconds of the fastest among the layout and its near-duplicates."""
        return min(each.time.total for each in (self.layout, *self.alike))


def complexity(choice: Choice) -> tuple[float, ...]:
    """Return what a layout needs beyond plain data parallelism, the costliest to understand first:
    less is simpler.
    """
    degrees = (choice.pp, choice.cp, choice.tp, choice.ep)
    splits = choice.schedule in SPLIT_SCHEDULES
    return (
        choice.offload,
        sum(degree > 1 for degree in degrees),
        splits,
        choice.zero == 3,
        math.prod(degrees),
        choice.interleave if choice.pp > 1 else 1,
        choice.zero,
        choice.zero > 0 and choice.shard_factor < choice.num_replicas,
        choice.effort,
        len(choice.gather_words),
        bool(context_words(choice.exchange, choice.order)),
    )


def simplest(layouts: Sequence[RankedLayout]) -> RankedLayout:
    """Return the simplest layout; among equally simple ones the fastest."""
    return min(layouts, key=lambda each: (*complexity(each.choice), each.time.total))


def is_tie(first_s: float, other_s: float) -> bool:
    """Check that the lead of one time over the other is too small to rank the two layouts."""
    return max(first_s, other_s) <= (1 + TIE_SHARE) * min(first_s, other_s)


def group_alike(ranked: Sequence[RankedLayout], shown: RankedLayout | None = None) -> list[Line]:
    """Group near-duplicates into lines, each shown as its simplest layout, ordered by time;
    ``shown`` is never hidden.

    ``ranked``: ordered by time.
    """
    lines: list[Line] = []
    left = list(ranked)
    while left:
        fastest, degrees = left[0], left[0].choice.degrees
        alike = [
            each
            for each in left
            if each.choice.degrees == degrees and is_tie(fastest.time.total, each.time.total)
        ]
        chosen = next((each for each in alike if each is shown), None) or simplest(alike)
        lines.append(Line(chosen, tuple(each for each in alike if each is not chosen)))
        left = [each for each in left if each not in alike]
    return lines


def choose_lines(
    ranked: Sequence[RankedLayout],
    number: int,
    lowered: Callable[[RankedLayout], RankedLayout | None],
) -> list[Line]:
    """Return up to ``number`` lines by time, but first the simplest that ties with the fastest.

    Args:
        ranked: layouts that fit, ordered by time.
        lowered: returns a layout with its schedule as it will run, or None if it does not fit.
    """
    left = list(ranked)
    while left:
        first = simplest([each for each in left if is_tie(left[0].time.total, each.time.total)])
        whole = lowered(first)
        if whole is not None:
            lines = group_alike(left, first)
            (line,) = (line for line in lines if line.layout is first)
            return [line._replace(layout=whole), *(other for other in lines if other is not line)][
                :number
            ]
        left.remove(first)
    return []
