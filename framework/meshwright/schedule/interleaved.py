"""Interleaved 1F1B: several stages per rank, in turns of a group of micro-batches each.
Notation as in :mod:`build`.
"""

from __future__ import annotations

from itertools import chain, pairwise

from meshwright.schedule.action import Action, Kind, Schedule


def interleaved_1f1b(pp: int, chunks: int, interleave: int = 2) -> Schedule:
    """Build interleaved 1F1B over ``interleave`` stages of each rank (Narayanan 2021, Megatron-LM's
    interleaved schedule).

    Micro-batches go in groups (1): a group runs through the first stage of a rank, then its second,
    ..; in backward the last stage is first. A group smaller than pp would leave ranks idle, so a
    remainder of ``chunks`` / pp does not form a group of its own: it makes the other groups larger,
    the first ones by one more. pp=2, interleave=2, chunks=5, groups of 3 and 2:

        rank 0 | F0 F1 F2 f0 f1 f2 b0 F3 b1 F4 b2 f3 B0 f4 B1 .  B2 .  b3 b4 B3 B4     stages 0 (F, B) and 2 (f, b)
        rank 1 | .  F0 F1 F2 f0 b0 f1 b1 f2 b2 F3 B0 F4 B1 f3 B2 f4 b3 b4 B3 B4 .      stages 1 (F, B) and 3 (f, b)

    (2) forwards until the first backward can run; then as 1f1b.

    Bubble (pp-1) / (interleave x chunks + pp-1) of total time where chunks >= pp. Rank r holds at
    most (interleave-1) x g + 2 (pp-1-r) + 1 micro-batches, each of a stage with 1/interleave of its
    layers; g is the size of the first group: pp if pp divides chunks, else ceil(chunks /
    floor(chunks / pp)).
    """
    groups = _groups(pp, chunks)
    turns = range(interleave)

    def row(rank: int) -> tuple[Action, ...]:
        # (1)
        forwards = [
            Action(Kind.F, turn * pp + rank, m) for group in groups for turn in turns for m in group
        ]
        backwards = [
            Action(Kind.B, turn * pp + rank, m)
            for group in groups
            for turn in turns[::-1]
            for m in group
        ]
        # (2)
        num_fill = min((interleave - 1) * len(groups[0]) + 2 * (pp - 1 - rank), len(forwards))
        in_turns = chain.from_iterable(zip(forwards[num_fill:], backwards, strict=False))
        return (*forwards[:num_fill], *in_turns, *backwards[len(forwards) - num_fill :])

    return Schedule(
        "interleaved_1f1b", pp, pp * interleave, chunks, tuple(row(rank) for rank in range(pp))
    )


def _groups(pp: int, chunks: int) -> list[range]:
    """Divide micro-batches into as many groups of at least pp as possible;
    one group if there are fewer than pp.
    """
    num_groups = max(1, chunks // pp)
    size, over = divmod(chunks, num_groups)
    firsts = [index * size + min(index, over) for index in range(num_groups + 1)]
    return [range(first, end) for first, end in pairwise(firsts)]
