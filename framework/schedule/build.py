"""Builders of compute schedules from a name, pp, chunks and interleave; :mod:`lower` adds communication.

Schedules with a whole backward are here; those that split it are in :mod:`zero_bubble` and :mod:`v_shape`. The
pictures have F as long as B; their numbers stand at the lines that make what they point at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

from meshwright.errors import ScheduleError
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.v_shape import v_half, v_min, zb_v
from meshwright.schedule.zero_bubble import zb_h1, zb_h2


def gpipe(pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build GPipe: all forwards, then all backwards (Huang 2019).

                 |--- (1) ---|           |--- (2) ---|
        rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    Bubble (pp-1) / (chunks+pp-1) of total time; every rank holds the activations of all ``chunks`` micro-batches.
    """

    assert interleave == 1, interleave

    def row(stage: int) -> tuple[Action, ...]:
        forwards = [Action(Kind.F, stage, microbatch) for microbatch in range(chunks)]  # (1)
        backwards = [Action(Kind.B, stage, microbatch) for microbatch in range(chunks)]  # (2)
        return (*forwards, *backwards)

    return Schedule("gpipe", pp, pp, chunks, tuple(row(stage) for stage in range(pp)))


def one_f_one_b(pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build 1F1B: after the fill, forwards and backwards in turns (Narayanan 2019, "1F1B-flush").

                 |(1)| |----- (2) -----| |-- (3) --|
        rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     (1) pp-1-rank forwards fill the pipeline
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .      (2) one forward and one backward, in turns
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      (3) the backwards that are left

    The bubble of gpipe, (pp-1) / (chunks+pp-1) of total time, but rank r never holds more than ``min(pp-r, chunks)``
    micro-batches. With fewer micro-batches than ranks the fill is cut short; with one this is naive model parallelism.
    """

    assert interleave == 1, interleave

    def row(stage: int) -> tuple[Action, ...]:
        forwards = [Action(Kind.F, stage, microbatch) for microbatch in range(chunks)]
        backwards = [Action(Kind.B, stage, microbatch) for microbatch in range(chunks)]
        return _filled_then_in_turns(forwards, backwards, num_fill=pp - 1 - stage)

    return Schedule("1f1b", pp, pp, chunks, tuple(row(stage) for stage in range(pp)))


def interleaved_1f1b(pp: int, chunks: int, interleave: int = 2) -> Schedule:
    """Build interleaved 1F1B over ``interleave`` stages of each rank (Narayanan 2021, Megatron-LM's interleaved
    schedule).

    Micro-batches go in groups (1): a group passes the first stage of a rank, then its second, .. and backward the last
    stage first. A group smaller than pp would leave a rank idle before each turn, so what is over when pp does not
    divide ``chunks`` makes the groups larger, the first ones by one more. pp=2, interleave=2, chunks=5, groups of 3
    and 2:

        rank 0 | F0 F1 F2 f0 f1 f2 b0 F3 b1 F4 b2 f3 B0 f4 B1 .  B2 .  b3 b4 B3 B4     stages 0 (F, B) and 2 (f, b)
        rank 1 | .  F0 F1 F2 f0 b0 f1 b1 f2 b2 F3 B0 F4 B1 f3 B2 f4 b3 b4 B3 B4 .      stages 1 (F, B) and 3 (f, b)

    (2) Enough forwards that the first backward is there when they are done; then as 1f1b.

    Bubble (pp-1) / (interleave x chunks + pp-1) of total time where chunks >= pp. Rank r holds at most
    (interleave-1) x g + 2 (pp-1-r) + 1 micro-batches, of stages that are 1/interleave of its layers each; g is the size
    of the first group: pp for a multiple of pp, else ceil(chunks / floor(chunks / pp)).
    """
    groups = _groups(pp, chunks)
    turns = range(interleave)

    def row(rank: int) -> tuple[Action, ...]:
        forwards = [Action(Kind.F, turn * pp + rank, m) for group in groups for turn in turns for m in group]  # (1)
        backwards = [Action(Kind.B, turn * pp + rank, m) for group in groups for turn in turns[::-1] for m in group]
        num_fill = (interleave - 1) * len(groups[0]) + 2 * (pp - 1 - rank)  # (2)
        return _filled_then_in_turns(forwards, backwards, num_fill)

    return Schedule("interleaved_1f1b", pp, pp * interleave, chunks, tuple(row(rank) for rank in range(pp)))


def _groups(pp: int, chunks: int) -> list[range]:
    """Group micro-batches into as many groups of at least pp as possible; one group where there are fewer than pp."""
    num_groups = max(1, chunks // pp)
    size, over = divmod(chunks, num_groups)
    firsts = [index * size + min(index, over) for index in range(num_groups + 1)]
    return [range(first, end) for first, end in pairwise(firsts)]


def _filled_then_in_turns(forwards: list[Action], backwards: list[Action], num_fill: int) -> tuple[Action, ...]:
    """Return the row of 1f1b and of its interleaved form. ``num_fill`` may exceed the number of forwards."""
    num_fill = min(num_fill, len(forwards))
    actions = forwards[:num_fill]  # (1)
    for forward, backward in zip(forwards[num_fill:], backwards, strict=False):  # (2)
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - num_fill :])  # (3)


BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
}
"""Schedule builders by configuration name: (pp, chunks, interleave) -> Schedule."""

MAX_FORWARDS = 2**18
"""Most forwards of a step: pp x chunks x interleave. Each is an action that is written out for every rank."""

INTERLEAVES = {"interleaved_1f1b": range(2, sys.maxsize), **dict.fromkeys(["zb_v", "v_half", "v_min"], range(2, 3))}
"""Possible numbers of stages per rank of each schedule; only 1 for schedules not listed."""


def build(name: str, pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build the compute schedule of this name. ``interleave``: stages per pipeline rank.

    Raises :class:`ScheduleError` for an unknown name, a degree below one, or an interleave that the schedule has not.
    """
    if name not in BUILDERS:
        raise ScheduleError(
            "MW-SCHEDULE-009", f"pipeline.schedule={name!r} is not known: choose one of {', '.join(BUILDERS)}"
        )
    if pp < 1 or chunks < 1 or interleave < 1:
        raise ScheduleError(
            "MW-SCHEDULE-010",
            f"pp={pp}, chunks={chunks}, interleave={interleave}: a step needs at least one pipeline rank, one "
            f"micro-batch and one stage per rank",
        )
    if pp * chunks * interleave > MAX_FORWARDS:
        raise ScheduleError(
            "MW-SCHEDULE-011",
            f"pp={pp} x chunks={chunks} x interleave={interleave} = {pp * chunks * interleave:,} forwards in a step, "
            f"and at most {MAX_FORWARDS:,} are scheduled: lower batch.chunks, parallel.pp or pipeline.interleave",
        )
    possible = {each: INTERLEAVES.get(each, range(1, 2)) for each in BUILDERS}
    if interleave not in possible[name]:
        first, has_one = possible[name][0], len(possible[name]) == 1
        raise ScheduleError(
            "MW-SCHEDULE-012",
            f"pipeline.interleave={interleave}: {name} has {first}{'' if has_one else ' or more'} stages on each rank: "
            f"set pipeline.interleave={first}, or choose a schedule that can have {interleave}: "
            f"{', '.join(each for each in BUILDERS if interleave in possible[each])}",
        )
    return BUILDERS[name](pp, chunks, interleave)
