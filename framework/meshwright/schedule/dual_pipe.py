"""DualPipeV: forward of one micro-batch in turns with backward of another;
each hides the communication of the other.

A rank holds an early and a late stage (``Placement.V``). In the middle of a step it computes pairs,
{0F5+7B1}: forward of one of its stages takes turns with backward of the other, and each runs while
the expert all-to-all of the other is in flight (framework/meshwright/mesh/turns.py).
"""

from __future__ import annotations

from collections import Counter, deque

from meshwright.schedule.action import Action, Item, Kind, Placement, Schedule, actions_of


def dualpipe_v(pp: int, chunks: int, interleave: int = 2) -> Schedule:
    """Build DualPipeV (DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe).

    F B I W of the stage on the way down, f b i w of that on the way up, all of one length; pp=2,
    chunks=6:

                                      |-------------- (4) --------------| |-- (5) --|
        rank 0 | F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 F4 b2 f3 B1 F5 b3 f4 B2 b4 .  f5 B3 b5 I4 W4 I5 W5
        rank 1 | .  F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 F4 b2 f4 B2 F5 b3 f5 B3 b4 B4 .  i5 I5 w5 W5

    (1) forwards until the first micro-batch comes back up; (2) forwards of both stages,
    alternating; (3) the late stage alone until its gradient comes back up; (4) pairs; (5) pairs
    until no forward is left; (6) backwards, the second half split; (7) a weight gradient while the
    next gradient is in flight; (8) the remaining weight gradients.

    Pairs pay off where F and B contain long communication (experts); otherwise zb_v has the smaller
    bubble. Each rank holds up to 2pp+1 micro-batches of half-size stages. With fewer than 2pp
    micro-batches this is the schedule of 2pp without the missing ones; half a pair is a computation
    of its own.
    """
    assert interleave == 2, interleave
    planned = max(chunks, 2 * pp)
    rows: list[tuple[Item, ...]] = []
    for rank in range(pp):
        items = (_keep(item, chunks) for item in _row(pp, rank, planned))
        rows.append(tuple(item for item in items if item is not None))
    return Schedule("dualpipe_v", pp, 2 * pp, chunks, tuple(rows), Placement.V)


def _row(pp: int, rank: int, chunks: int) -> list[Item]:
    down, up, later = rank, 2 * pp - 1 - rank, pp - 1 - rank  # ranks further down
    done: Counter[tuple[bool, int]] = Counter()
    halves: deque[Action] = deque()  # W that are due, of both stages
    items: list[Item] = []

    def next_of(kind: Kind, stage: int) -> Action:
        action = Action(kind, stage, done[kind is Kind.F, stage])
        done[kind is Kind.F, stage] += 1
        if kind is Kind.I:
            halves.append(action._replace(kind=Kind.W))
        return action

    items += [next_of(Kind.F, down) for _ in range(2 * later)]  # (1)
    for _ in range(rank + 1):  # (2)
        items += [next_of(Kind.F, down), next_of(Kind.F, up)]
    for _ in range(later):  # (3)
        items += [next_of(Kind.I, up), halves.popleft(), next_of(Kind.F, up)]
    for number in range(chunks - 2 * pp + rank + 1):  # (4)
        pair = next_of(Kind.F, down), next_of(Kind.B, up)
        # the turn: the first gradient waits for this rank alone
        items += pair if later == number == 0 else [pair]
        items.append((next_of(Kind.F, up), next_of(Kind.B, down)))
    for _ in range(later):  # (5)
        items += [next_of(Kind.B, up), (next_of(Kind.F, up), next_of(Kind.B, down))]
    for number in range(2 * (rank + 1)):  # (6)
        items.append(next_of(Kind.B if number <= rank else Kind.I, down if number % 2 else up))
    for _ in range(later):  # (7)
        items += [halves.popleft(), next_of(Kind.I, down)]
    return [*items, *halves]  # (8)


def _keep(item: Item, chunks: int) -> Item | None:
    """Return an item without the micro-batches from ``chunks`` on; None if nothing is left."""
    actions = tuple(action for action in actions_of(item) if (action.microbatch or 0) < chunks)
    return actions if len(actions) > 1 else actions[0] if actions else None
