"""Schedules whose stages go down the ranks and come back (``Placement.V``): each rank holds an early and a late one.

The last stage is on the first rank, so that backward begins where forward began: a rank's early stage holds its
micro-batches for long and its late one for short, and the sum is the same on all ranks.
"""

from __future__ import annotations

from collections import Counter

from framework.schedule.action import Action, Kind, Placement, Schedule


def zb_v(pp: int, chunks: int, interleave: int = 2) -> Schedule:
    """zb_h2's bubble in 1f1b's memory (Qi et al. 2023, arXiv 2401.10241, section 6).

    F I W of the stage on the way down, f i w of that on the way up, all of one length; pp=2, chunks=4:

        rank 0 | F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
        rank 1 | .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    (1) forwards until the first micro-batch comes back up; (2) in turns with it until its gradient comes down; (3) the
    late stage alone until that comes back up; (4) three of each stage in turns; (5) (6) the gradients that are left,
    those that others wait for first; (7) the weight gradients that are left.

    No idle between a rank's first F and its last W where chunks >= 2pp-1, and (pp-1) F over all ranks, of half-size
    stages. Each rank holds up to 2pp micro-batches of half-size stages until W: the pp of 1f1b's first rank.
    """
    assert interleave == 2, interleave
    # What one micro-batch needs is of itself: a schedule of more micro-batches with some struck out is one of fewer.
    planned = max(chunks, 2 * pp - 1)

    def row(rank: int) -> tuple[Action, ...]:
        down, up = rank, 2 * pp - 1 - rank
        done: Counter[tuple[Kind, int]] = Counter()
        actions: list[Action] = []

        def do(stage: int, *kinds: Kind) -> None:
            for kind in kinds:
                actions.append(Action(kind, stage, done[kind, stage]))
                done[kind, stage] += 1

        for _ in range(2 * (pp - rank) - 1):  # (1)
            do(down, Kind.F)
        for _ in range(rank):  # (2)
            do(up, Kind.F)
            do(down, Kind.F)
        for _ in range(pp - rank):  # (3)
            do(up, Kind.F, Kind.I, Kind.W)
        while done[Kind.F, up] < planned:  # (4)
            if done[Kind.F, down] < planned:
                do(down, Kind.F)
            do(down, Kind.I, Kind.W)
            do(up, Kind.F, Kind.I, Kind.W)
        for _ in range(rank):  # (5)
            do(down, Kind.I)
            do(up, Kind.I)
        for _ in range(pp - rank):  # (6)
            do(down, Kind.I, Kind.W)
        for stage in (up, down):  # (7)
            while done[Kind.W, stage] < planned:
                do(stage, Kind.W)
        return tuple(action for action in actions if action.microbatch in range(chunks))

    return Schedule("zb_v", pp, 2 * pp, chunks, tuple(row(rank) for rank in range(pp)), Placement.V)
