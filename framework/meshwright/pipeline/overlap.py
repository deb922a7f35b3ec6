"""Pairs of a schedule: F of one stage and a backward of another. Each runs while messages of the
other are in flight.

    F a   attention, router | dispatch ..         experts | combine ..      the rest, next block | ...
    B b                     | its own ..  | combine ..    experts | dispatch ..   attention, block before | ...

Layers are not split: a turn ends inside a layer, after it posts an expert all-to-all and before it
waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from meshwright.current import CurrentMicrobatch
from meshwright.mesh.comm import Group
from meshwright.pipeline.timing import RowTimes
from meshwright.pipeline.value_store import Computation


class Pair(NamedTuple):
    """F and B (or I) of a pair."""

    forward: Computation
    backward: Computation


RunPair = Callable[[Callable[[], None], Callable[[], None], RowTimes], None]
"""Function that runs both computations of a pair."""


def in_order(forward: Callable[[], None], backward: Callable[[], None], times: RowTimes) -> None:
    """Run F, then the backward."""
    forward()
    backward()


def in_turns(ep: Group, current: CurrentMicrobatch) -> RunPair:
    """Return the function that runs pairs in turns;
    a turn ends at an all-to-all of the expert group ``ep``.

    A group of one rank, and a dry run, take no turns. ``current``: samples of the micro-batch, saved
    and restored in each.
    """
    activity = ep.activity

    def save() -> Callable[[], None]:
        saved, what = replace(current), activity.now[0]

        def restore() -> None:
            vars(current).update(vars(saved))
            activity.begin(what)

        return restore

    def run(forward: Callable[[], None], backward: Callable[[], None], times: RowTimes) -> None:
        first = len(times.readings)
        ep.turns.run(forward, backward, save)
        times.separate(first)

    return run if ep.takes_turns and ep.size > 1 else in_order
