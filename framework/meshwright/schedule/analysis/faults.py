"""Checks of a lowered schedule: each action once, in an order that can run, without a deadlock.

The actions that a schedule must contain follow from its stages, chunks and placement alone:

    each stage and micro-batch      1RECV_F0 < 1F0 < 1SEND_F0        < : earlier in the same row; messages only
                                    1RECV_B0 < 1B0 < 1SEND_B0        where the neighbouring stage is on another rank
                                    1F0 < 1B0,  or  1F0 < 1I0 < 1W0
    each stage                      every 1B, 1W < 1REDUCE
    each rank                       everything < STEP

Each action occurs exactly once, on the rank of its stage, and there are no others. Messages between
two ranks are received in the order in which they are sent. In a simulation with blocking sends no
rank waits forever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from meshwright.schedule.action import (
    COMPLETES_BACKWARD,
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
)
from meshwright.schedule.analysis.simulator import BlockedRank, Channel, Costs, play
from meshwright.schedule.text import format_item


class Fault(StrEnum):
    """Kinds of faults of a schedule."""

    MISSING = "missing"
    RECEIVE_MISSING = "receive missing"
    SEND_MISSING = "send missing"
    WEIGHTS_MISSING = "weight gradient missing"
    REPEATED = "repeated"
    WRONG_RANK = "on the wrong rank"
    BACKWARD_TWICE = "backward both whole and in halves"
    UNEXPECTED = "unexpected"
    BACKWARD_TOO_EARLY = "backward before its forward"
    WEIGHTS_TOO_EARLY = "weight gradient before its input gradient"
    USED_TOO_EARLY = "used before it is there"
    SENT_TOO_EARLY = "sent before it is made"
    REDUCED_TOO_EARLY = "reduced before the last backward"
    STEP_NOT_LAST = "step is not last"
    CROSSED = "messages crossed"
    DEADLOCK = "deadlock"


class Problem(NamedTuple):
    """Fault at ``position`` of the row of pipeline rank ``rank``,
    with a description in ``text``.
    """

    fault: Fault
    rank: int
    position: int
    """Position in the row; of a missing action, where it should stand.
    At most the length of the row.
    """
    action: Action
    text: str


def check(schedule: Schedule, channel: Channel = Channel.RENDEZVOUS) -> list[Problem]:
    """Return all problems of a lowered schedule, causes before consequences. Without any, it runs.

    ``channel``: transport on which no rank may block forever. A schedule that runs with rendezvous
        runs with any.
    Linear in the number of actions.
    """
    problems = []
    for rank in range(schedule.pp):
        places = _places(schedule, rank)
        problems += [*_each_once(schedule, rank, places), *_in_order(schedule, rank, places)]
    problems += [*_uncrossed(schedule), *_no_deadlock(schedule, channel)]
    return problems


def _places(schedule: Schedule, rank: int) -> dict[Action, int]:
    """Return the first position of each action of a row."""
    places: dict[Action, int] = {}
    for position, action in schedule.actions(rank):
        places.setdefault(action, position)
    return places


def _computations(schedule: Schedule, rank: int, places: dict[Action, int]) -> Iterator[Action]:
    """Yield the computations expected of a rank: F, and B or I and W,
    whichever its row contains.
    """
    for stage in schedule.stages_of(rank):
        for microbatch in range(schedule.chunks):
            whole = Action(Kind.B, stage, microbatch)
            halves = [whole._replace(kind=kind) for kind in (Kind.I, Kind.W)]
            num_halves = sum(half in places for half in halves)
            is_split = num_halves == 2 or (num_halves == 1 and whole not in places)
            yield whole._replace(kind=Kind.F)
            yield from halves if is_split else [whole]


def _expected(schedule: Schedule, rank: int, places: dict[Action, int]) -> Iterator[Action]:
    for action in _computations(schedule, rank, places):
        around = schedule.receive_for(action), action, schedule.send_after(action)
        yield from (each for each in around if each is not None)
    yield from (Action(Kind.REDUCE, stage) for stage in schedule.stages_of(rank))
    yield Action(Kind.STEP)


def _each_once(schedule: Schedule, rank: int, places: dict[Action, int]) -> Iterator[Problem]:
    expected = dict.fromkeys(_expected(schedule, rank, places))
    seen: set[Action] = set()
    for position, action in schedule.actions(rank):
        if action in seen:
            text = f"{action} stands at position {places[action]} already: it would be done twice"
            yield Problem(Fault.REPEATED, rank, position, action, text)
        elif action not in expected:
            yield _out_of_place(schedule, rank, position, action)
        seen.add(action)
    for action in expected:
        if action not in seen:
            yield _missing(schedule, rank, action, places)


def _out_of_place(schedule: Schedule, rank: int, position: int, action: Action) -> Problem:
    stage = action.stage
    assert stage is not None, action  # STEP is always expected
    if not 0 <= stage < schedule.num_stages or not 0 <= (action.microbatch or 0) < schedule.chunks:
        text = (
            f"{action}: there are stages 0..{schedule.num_stages - 1} and micro-batches"
            f" 0..{schedule.chunks - 1} only"
        )
    elif schedule.rank_of(stage) != rank:
        text = (
            f"{action}: stage {stage} is held by rank {schedule.rank_of(stage)}, not by rank {rank}"
        )
        return Problem(Fault.WRONG_RANK, rank, position, action, text)
    elif action.kind in COMPUTE:  # F is always expected
        other = "in halves, I and W" if action.kind is Kind.B else "whole, B"
        text = (
            f"{action}: this micro-batch has its backward {other}: part of it would be done twice"
        )
        return Problem(Fault.BACKWARD_TWICE, rank, position, action, text)
    else:
        text = f"{action}: stage {stage} has no neighbour on another rank to exchange this with"
    return Problem(Fault.UNEXPECTED, rank, position, action, text)


def _missing(schedule: Schedule, rank: int, action: Action, places: dict[Action, int]) -> Problem:
    text = f"{action} is nowhere in the row"
    if action.kind in RECEIVES | SENDS:
        text += f"; its partner is {action.partner()} of rank {schedule.peer(action)}"
    position = len(schedule.rows[rank])
    for _, earlier, later in _around(schedule, action):
        if earlier == action and later in places:
            position = places[later]
        elif later == action and earlier in places:
            position = places[earlier] + 1
    return Problem(_MISSING.get(action.kind, Fault.MISSING), rank, position, action, text)


def _around(schedule: Schedule, action: Action) -> Iterator[tuple[Fault, Action, Action]]:
    """Yield the rules for the stage and micro-batch of an action, for whole and split backward."""
    if action.kind in COMPUTE | RECEIVES | SENDS:
        for computation in (
            action._replace(kind=kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        ):
            yield from _rules_of_one(schedule, computation)


_MISSING = {
    **dict.fromkeys(RECEIVES, Fault.RECEIVE_MISSING),
    **dict.fromkeys(SENDS, Fault.SEND_MISSING),
    Kind.W: Fault.WEIGHTS_MISSING,
}


def _in_order(schedule: Schedule, rank: int, places: dict[Action, int]) -> Iterator[Problem]:
    """Yield a problem for each rule of the table above whose actions are in the wrong order.
    Skips missing actions.
    """
    for fault, earlier, later in _rules(schedule, rank, places):
        if earlier in places and later in places and not places[earlier] < places[later]:
            text = (
                f"{later} at position {places[later]} needs {earlier}, which comes at position"
                f" {places[earlier]}"
            )
            yield Problem(fault, rank, places[later], later, text)
    step = Action(Kind.STEP)
    if step in places and places[step] != len(schedule.rows[rank]) - 1:
        after = format_item(schedule.rows[rank][places[step] + 1])
        yield Problem(Fault.STEP_NOT_LAST, rank, places[step], step, f"{after} comes after STEP")


def _rules(
    schedule: Schedule, rank: int, places: dict[Action, int]
) -> Iterator[tuple[Fault, Action, Action]]:
    last_backwards: dict[int | None, Action] = {}
    for action in _computations(schedule, rank, places):
        yield from _rules_of_one(schedule, action)
        last = last_backwards.get(action.stage)
        if action.kind in COMPLETES_BACKWARD and (
            last is None or places.get(last, -1) < places.get(action, -1)
        ):
            last_backwards[action.stage] = action
    for stage, action in last_backwards.items():
        yield Fault.REDUCED_TOO_EARLY, action, Action(Kind.REDUCE, stage)


def _rules_of_one(schedule: Schedule, action: Action) -> Iterator[tuple[Fault, Action, Action]]:
    receive, send = schedule.receive_for(action), schedule.send_after(action)
    if receive is not None:
        yield Fault.USED_TOO_EARLY, receive, action
    if send is not None:
        yield Fault.SENT_TOO_EARLY, action, send
    yield from _rules_on_one_rank(action)


def _rules_on_one_rank(action: Action) -> Iterator[tuple[Fault, Action, Action]]:
    """Yield the rules within a rank: backward needs its own forward;
    stages of one rank pass values without messages.

    Computations of other ranks are not in the places of this row, so rules that name them have no
    effect.
    """
    stage, microbatch = action.stage, action.microbatch
    assert stage is not None
    if action.kind is Kind.F:
        yield Fault.USED_TOO_EARLY, Action(Kind.F, stage - 1, microbatch), action
    elif action.kind is Kind.W:
        yield Fault.WEIGHTS_TOO_EARLY, Action(Kind.I, stage, microbatch), action
    else:
        yield Fault.BACKWARD_TOO_EARLY, Action(Kind.F, stage, microbatch), action
        for kind in (Kind.B, Kind.I):
            yield Fault.USED_TOO_EARLY, Action(kind, stage + 1, microbatch), action


def _uncrossed(schedule: Schedule) -> Iterator[Problem]:
    """Find the first message of each channel that another one overtakes.
    Skips messages without a partner.
    """
    # by link: receive -> position of its send
    sent: dict[tuple[int, int], dict[Action, int]] = defaultdict(dict)
    received: dict[tuple[int, int], dict[Action, int]] = defaultdict(dict)
    for rank in range(schedule.pp):
        for position, action in schedule.actions(rank):
            if action.kind in SENDS:
                sent[rank, schedule.peer(action)].setdefault(action.partner(), position)
            elif action.kind in RECEIVES:
                received[schedule.peer(action), rank].setdefault(action, position)
    for (source, destination), receives in received.items():
        sends = sent[source, destination]
        pairs = zip(
            (r for r in sends if r in receives), (r for r in receives if r in sends), strict=True
        )
        for comes, awaited in pairs:
            if comes != awaited:
                text = (
                    f"rank {destination} receives {awaited} at position {receives[awaited]}, but"
                    f" the next message from rank {source} is {comes.partner()}: messages between"
                    " two ranks are matched in order"
                )
                yield Problem(Fault.CROSSED, destination, receives[awaited], awaited, text)
                break


def _no_deadlock(schedule: Schedule, channel: Channel) -> Iterator[Problem]:
    _, blocked = play(schedule, Costs(), channel)
    waits = {stuck.rank: stuck for stuck in blocked}
    for stuck in blocked:
        peer = schedule.peer(stuck.action)
        text = (
            f"with {channel} sends {stuck.action} blocks forever:"
            f" {_what_it_does(schedule, peer, waits.get(peer))}"
        )
        yield Problem(Fault.DEADLOCK, stuck.rank, stuck.position, stuck.action, text)


def _what_it_does(schedule: Schedule, peer: int, stuck: BlockedRank | None) -> str:
    if stuck is None:
        return f"rank {peer} has finished its row"
    item = schedule.rows[peer][stuck.position]
    return f"rank {peer} is at position {stuck.position}, {format_item(item)}"
