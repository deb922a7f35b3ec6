"""Simulated time of a pair: two computations in turns,
each of which runs while messages of the other are in flight.

processor    F ===  B ===       F ===    B ===  F ===             one at a time; a turn ends with a message
wire            FFFFFF   BBBBBB    FFFFFF    BBB                  one message at a time, in the order of the turns
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat, zip_longest
from typing import NamedTuple

from meshwright.schedule.action import Action
from meshwright.schedule.analysis.timeline import Span


class Part(NamedTuple):
    """Computation up to a message, and that message, in seconds;
    the last part of a computation has none.
    """

    computed: float
    message: float


def parts_of(seconds: float, num_messages: int, message_s: float) -> list[Part]:
    """Cut a computation of ``seconds``, ``message_s`` of them in its messages, into equal parts."""
    computed = max(0.0, seconds - message_s) / (num_messages + 1)
    return [
        *repeat(Part(computed, message_s / max(num_messages, 1)), num_messages),
        Part(computed, 0.0),
    ]


def seconds_in_turns(first: Sequence[Part], second: Sequence[Part]) -> float:
    """Return the seconds of two computations in turns,
    as :class:`meshwright.mesh.turns.Turns` runs them.
    """
    clock = wire = 0.0
    ready = [0.0, 0.0]
    for index, part in enumerate(chain.from_iterable(zip_longest(first, second))):
        if part is not None:
            clock = max(clock, ready[index % 2]) + part.computed
            if part.message:
                wire = ready[index % 2] = max(clock, wire) + part.message
    return clock


def pair_spans(
    rank: int, pair: Sequence[Action], start: float, parts: Sequence[Sequence[Part]]
) -> list[Span]:
    """Return the spans of a pair from ``start``: one after the other,
    in proportion to what each takes alone.
    """
    (first, second), seconds = pair, seconds_in_turns(*parts)
    alone, other = (
        sum(part.computed + part.message for part in computations) for computations in parts
    )
    middle = start + (alone if seconds == alone + other else seconds * alone / (alone + other))
    return [
        Span(rank, first, start, middle, second),
        Span(rank, second, middle, start + seconds, first),
    ]
