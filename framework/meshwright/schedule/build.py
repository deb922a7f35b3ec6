"""Builders of compute schedules from a name, pp, chunks and interleave;
:mod:`lower` adds communication.

GPipe and 1F1B are here. :mod:`interleaved` has several stages per rank; :mod:`zero_bubble`,
:mod:`v_shape` and :mod:`dual_pipe` split the backward. In pictures F and B take one tick; (1), (2),
... mark the corresponding code.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.degrees import check_degrees
from meshwright.schedule.dual_pipe import dualpipe_v
from meshwright.schedule.interleaved import interleaved_1f1b
from meshwright.schedule.own import own_schedule
from meshwright.schedule.v_shape import v_half, v_min, zb_v
from meshwright.schedule.zero_bubble import zb_h1, zb_h2


def gpipe(pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build GPipe: all forwards, then all backwards (Huang 2019).

                 |--- (1) ---|           |--- (2) ---|
        rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    Bubble (pp-1) / (chunks+pp-1) of total time; every rank holds the activations of all ``chunks``
    micro-batches.
    """

    assert interleave == 1, interleave

    def row(stage: int) -> tuple[Action, ...]:
        forwards = [Action(Kind.F, stage, microbatch) for microbatch in range(chunks)]  # (1)
        backwards = [Action(Kind.B, stage, microbatch) for microbatch in range(chunks)]  # (2)
        return (*forwards, *backwards)

    return Schedule("gpipe", pp, pp, chunks, tuple(row(stage) for stage in range(pp)))


def one_f_one_b(pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build 1F1B: after the fill, forwards and backwards alternate (Narayanan 2021,
    "PipeDream-Flush").

                 |(1)| |----- (2) -----| |-- (3) --|
        rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     (1) pp-1-rank forwards fill the pipeline
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .      (2) forwards and backwards alternate
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      (3) the remaining backwards

    The bubble of gpipe, (pp-1) / (chunks+pp-1) of total time, but rank r never holds more than
    ``min(pp-r, chunks)`` micro-batches. With fewer micro-batches than ranks the fill is shorter;
    with one this is naive model parallelism.
    """

    assert interleave == 1, interleave

    def row(stage: int) -> tuple[Action, ...]:
        forwards = [Action(Kind.F, stage, microbatch) for microbatch in range(chunks)]
        backwards = [Action(Kind.B, stage, microbatch) for microbatch in range(chunks)]
        num_fill = min(pp - 1 - stage, chunks)  # (1)
        in_turns = chain.from_iterable(zip(forwards[num_fill:], backwards, strict=False))  # (2)
        return (*forwards[:num_fill], *in_turns, *backwards[chunks - num_fill :])  # (3)

    return Schedule("1f1b", pp, pp, chunks, tuple(row(stage) for stage in range(pp)))


BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}
"""Schedule builders by configuration name: (pp, chunks, interleave) -> Schedule."""


def build(name: str, pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build a compute schedule by name, or by a user's ``module:function``.

    ``interleave``: stages per pipeline rank.

    Raises :class:`ScheduleError` for an unknown name, a degree below one, or an unsupported
    interleave.
    """
    check_degrees(name, list(BUILDERS), pp, chunks, interleave)
    if ":" in name:
        return own_schedule(name, pp, chunks, pp * interleave)
    return BUILDERS[name](pp, chunks, interleave)
