"""Schedules whose stages go down the ranks and come back (``Placement.V``):
each rank holds an early and a late one.

The last stage is on the first rank, so backward begins where forward began. Where a rank's early
stage holds micro-batches for a long time, its late one holds them for a short time: activation
memory is the same on all ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from meshwright.schedule.action import Action, Kind, Placement, Schedule


def zb_v(pp: int, chunks: int, interleave: int = 2) -> Schedule:
    """Build ZB-V: zb_h2's bubble in 1f1b's memory (Qi et al. 2023, arXiv 2401.10241).

    F I W of the stage on the way down, f i w of that on the way up, all of one length; pp=2,
    chunks=4:

        rank 0 | F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
        rank 1 | .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    (1) forwards until the first micro-batch comes back up; (2) forwards of both stages,
    alternating, until its gradient comes down; (3) the late stage alone until that comes back up;
    (4) F I W of each stage, alternating; (5) (6) the remaining gradients, those that other ranks
    wait for first; (7) the remaining weight gradients.

    Over all ranks (pp-1) F of half-size stages are idle where chunks >= pp; between a rank's first
    F and its last W none where chunks >= 2pp-1. Each rank holds up to 2pp micro-batches of
    half-size stages until W: as much as 1f1b's first rank. With fewer than 2pp-1 micro-batches this
    is the schedule of 2pp-1 without the missing ones, and with weight gradients in the gaps that
    they leave (8).
    """
    assert interleave == 2, interleave
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

    schedule = Schedule(
        "zb_v", pp, 2 * pp, chunks, tuple(row(rank) for rank in range(pp)), Placement.V
    )
    return schedule if chunks == planned else _with_weights_in_gaps(schedule, room=2 * pp)  # (8)


def _with_weights_in_gaps(schedule: Schedule, room: int) -> Schedule:
    """Insert each W at a tick in which its rank would wait, or holds ``room`` micro-batches
    already. F and I keep their order.
    """
    todo = [
        deque(a for _, a in schedule.actions(rank) if a.kind is not Kind.W)
        for rank in range(schedule.pp)
    ]
    weights: list[deque[Action]] = [deque() for _ in todo]
    rows: list[list[Action]] = [[] for _ in todo]
    held = [0] * schedule.pp
    done: set[Action] = set()
    while any(todo) or any(weights):
        in_this_tick = []
        for rank, row in enumerate(rows):
            action = todo[rank][0] if todo[rank] else None
            has_input = action is not None and _needed(schedule, action) <= done
            if action and has_input and (action.kind is Kind.I or held[rank] < room):
                todo[rank].popleft()
            elif weights[rank]:
                action = weights[rank].popleft()
            else:
                continue
            row.append(action)
            held[rank] += (action.kind is Kind.F) - (action.kind is Kind.W)
            if action.kind is Kind.I:
                weights[rank].append(action._replace(kind=Kind.W))
            in_this_tick.append(action)
        assert in_this_tick, f"{schedule.name}: nobody can go on"
        done.update(in_this_tick)
    return replace(schedule, rows=tuple(tuple(row) for row in rows))


def _needed(schedule: Schedule, action: Action) -> set[Action]:
    """Return the computation that must be done in an earlier tick, on this rank or on another."""
    assert action.stage is not None
    if action.kind is Kind.F:
        return {action._replace(stage=action.stage - 1)} if action.stage > 0 else set()
    is_last = action.stage == schedule.num_stages - 1
    return {action._replace(kind=Kind.F) if is_last else action._replace(stage=action.stage + 1)}


def v_half(pp: int, chunks: int, interleave: int = 2) -> Schedule:
    """Build V-Half: half the memory of 1f1b and zb_v, half the bubble of 1f1b (Qi et al. 2024,
    arXiv 2405.15362).

    One micro-batch moves to the next rank in two slots between early stages, in one slot between
    late ones; its gradient in one slot between early stages, in two between late ones (1). The next
    micro-batch starts 6 slots later (2), so that no two computations of a rank coincide. pp=3:

        rank 0 | F . . . . . . . f i . w . . . . I . . W     F I W of the early stage, f i w of the late one
        rank 1 | . . F . . . . f . . . i w . . I W
        rank 2 | . . . . F . f . . . . . . i I w . W

    Simulator and executor keep this order (3), and run each computation as soon as possible. With
    four micro-batches:

        rank 0 | F0 F1 .  .  .  f0 i0 w0 F2 .  f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 .  f3 i3 I2 w3 W2 .  I3 W3
        rank 1 | .  F0 .  .  f0 F1 .  i0 w0 f1 F2 I0 W0 i1 w1 f2 F3 I1 W1 i2 w2 f3 I2 W2 i3 w3 .  I3 W3
        rank 2 | .  .  F0 f0 .  .  F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 w2 W2 .  i3 I3 w3 W3

    Each rank holds up to pp+1 micro-batches of half-size stages until W where pp is odd, pp+2 where
    it is even. Bubble (7 pp - 8) / 2 F of half-size stages, rounded down, where there are enough
    micro-batches.
    """
    assert interleave == 2, interleave
    pauses = (1, 0, 0) if pp % 2 else (3, 0, 4)
    return _from_block("v_half", pp, chunks, steps=(2, 1, 2, 1), pauses=pauses)


def v_min(pp: int, chunks: int, interleave: int = 2) -> Schedule:
    """Build V-Min: a third of the memory of 1f1b, two thirds of 1f1b's bubble (Qi et al. 2024,
    arXiv 2405.15362).

    As v_half, but with one slot from rank to rank in every direction, so that a micro-batch takes
    the least time. pp=3:

        rank 0 | F0 .  .  .  .  f0 F1 i0 w0 .  .  f1 F2 I0 i1 w1 W0 f2 F3 I1 i2 w2 W1 f3 .  I2 i3 w3 W2 .  .  I3 W3
        rank 1 | .  F0 .  .  f0 .  .  F1 i0 .  f1 w0 I0 F2 W0 i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 W2 .  i3 w3 .  I3 W3
        rank 2 | .  .  F0 f0 .  .  .  .  F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 .  .  i3 I3 w3 W3

    Each rank holds up to 2 floor((pp+4) / 3) micro-batches of half-size stages until W. Bubble 4 pp
    - 5 F of half-size stages, two more where 3 divides pp. There is no slack: if F, I and W take
    unequal times, or messages take time, each further micro-batch adds to the bubble.
    """
    assert interleave == 2, interleave
    return _from_block("v_min", pp, chunks, steps=(1, 1, 1, 1), pauses=(0, 0 if pp % 3 else 2, 0))


_PERIOD = 6
"""Slots between micro-batches: F I W of two stages."""


def _from_block(
    name: str, pp: int, chunks: int, steps: tuple[int, int, int, int], pauses: tuple[int, int, int]
) -> Schedule:
    """Build a schedule from slots per rank: ``steps`` of F down, F up, I down (late stages), I up
    (early stages); ``pauses`` between them.
    """
    turn, back, home = (1 + pause for pause in pauses)
    # on the first rank, where the gradient begins too
    forward_up = (steps[0] + steps[1]) * (pp - 1) + turn
    gradient_down = forward_up + back
    gradient_up = gradient_down + (steps[2] + steps[3]) * (pp - 1) + home

    def row(rank: int) -> tuple[Action, ...]:
        down, up = rank, 2 * pp - 1 - rank
        slots = {  # (1)
            (Kind.F, down): steps[0] * rank,
            (Kind.F, up): forward_up - steps[1] * rank,
            (Kind.I, up): gradient_down + steps[2] * rank,
            (Kind.I, down): gradient_up - steps[3] * rank,
        }
        for stage in (up, down):
            occupied = {slot % _PERIOD for slot in slots.values()}
            after = slots[Kind.I, stage] + 1
            slots[Kind.W, stage] = next(
                s for s in range(after, after + _PERIOD) if s % _PERIOD not in occupied
            )
        assert len({slot % _PERIOD for slot in slots.values()}) == _PERIOD, (name, pp, rank, slots)
        planned = [
            (slot + _PERIOD * microbatch, Action(kind, stage, microbatch))  # (2)
            for (kind, stage), slot in slots.items()
            for microbatch in range(chunks)
        ]
        return tuple(action for _, action in sorted(planned))  # (3)

    return Schedule(name, pp, 2 * pp, chunks, tuple(row(rank) for rank in range(pp)), Placement.V)
