"""Schedules with a split backward: the next rank waits for I; no rank waits for W,
which fills bubbles.

Qi, Wan, Huang, Lin 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241): the two handcrafted
schedules. In the pictures F, I and W take one tick each.
"""

from __future__ import annotations

from meshwright.schedule.action import Action, Kind, Schedule


def zb_h1(pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build ZB-H1: 1f1b with delayed W, by more on later ranks. A third of 1f1b's bubble;
    memory of its first rank.

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    (1) pp-1-rank forwards fill the pipeline; (2) F and I alternate; (3) W is ``rank`` micro-batches
    behind its I, so that the first I's are sent back at once; (4) the rest. Every rank is idle for
    (pp-1) (F+I-W) where chunks >= pp and W is no longer than F and I. Between F and I rank r holds
    at most min(pp-r, chunks) micro-batches, as in 1f1b; until W, which needs a part of what F
    saves, min(pp, chunks) on every rank: as the first rank in 1f1b.
    """
    assert interleave == 1, interleave
    return _with_late_weights("zb_h1", pp, chunks, extra=0)


def zb_h2(pp: int, chunks: int, interleave: int = 1) -> Schedule:
    """Build ZB-H2: zb_h1 with more forwards in place of its bubble. No rank idles between its first
    F and its last W; twice the memory.

        rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    (1) 2 (pp-1-rank) forwards; (3) W is 2 rank micro-batches behind. Rank r begins r ticks late and
    ends r ticks late. Where chunks >= 2pp-1 and W is no longer than F and I, it is idle for (pp-1)
    (F+I-2W) from its first F to its last W, which is 0 if they are equal; and for (pp-1) F of the
    time from the first rank's first F to the last rank's last W. Every rank holds up to 2pp-1
    micro-batches until W. With fewer than 2pp-1 it has fewer early forwards, and with pp or fewer
    it is zb_h1.
    """
    assert interleave == 1, interleave
    return _with_late_weights("zb_h2", pp, chunks, extra=max(0, min(pp - 1, chunks - pp)))


def _with_late_weights(name: str, pp: int, chunks: int, extra: int) -> Schedule:
    """Build zb_h1 or zb_h2. ``extra``: the micro-batches beyond pp that a rank may hold until W."""

    def row(stage: int) -> tuple[Action, ...]:
        num_fill = pp - 1 - stage + min(extra, pp - 1 - stage)
        num_late = stage + min(extra, stage)
        # (1)
        actions = [Action(Kind.F, stage, microbatch) for microbatch in range(min(num_fill, chunks))]
        for microbatch in range(chunks):
            if microbatch + num_fill < chunks:
                actions.append(Action(Kind.F, stage, microbatch + num_fill))  # (2)
            actions.append(Action(Kind.I, stage, microbatch))
            if microbatch >= num_late:
                actions.append(Action(Kind.W, stage, microbatch - num_late))  # (3)
        # (4)
        actions += [
            Action(Kind.W, stage, microbatch)
            for microbatch in range(max(0, chunks - num_late), chunks)
        ]
        return tuple(actions)

    return Schedule(name, pp, pp, chunks, tuple(row(stage) for stage in range(pp)))
