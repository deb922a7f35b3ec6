"""Receives posted one computation ahead,
so that a message is in flight while its receiver computes.

    as late as can be         1F0 1B0 {1SEND_B0+1RECV_F1} 1F1       1F1 waits for the whole transfer of its input
    one computation ahead     1F0 1RECV_F1 1B0 1SEND_B0 1F1         the input arrives during 1B0

The order of receives on each link does not change, because messages on a link are matched in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule.action import COMPUTE, RECEIVES, Action, Item, Schedule, actions_of


def post_ahead(schedule: Schedule, row: Sequence[Item]) -> list[Item]:
    """Move each receive of a row before the computation that precedes its use,
    unless it is there or earlier already.

    A pair counts as one computation. Messages are not grouped yet.
    """
    messages: list[Action] = []
    computations: list[Item] = []
    place_of: dict[Action, int] = {}  # message -> number of the computation after it
    used_in: dict[Action | None, int] = {}  # receive -> number of the computation that uses it
    for item in row:
        if isinstance(item, Action) and item.kind not in COMPUTE:
            place_of[item] = len(computations)
            messages.append(item)
        else:
            for action in actions_of(item):
                used_in[schedule.receive_for(action)] = len(computations)
            computations.append(item)
    next_place: dict[int, int] = {}  # peer -> place of the next receive on its link
    for message in reversed(messages):
        if message.kind in RECEIVES:
            place = place_of[message]
            ahead = max(0, used_in.get(message, place + 1) - 1)
            peer = schedule.peer(message)
            # not after the next receive on the same link, which would change their order
            place_of[message] = min(place, ahead, next_place.get(peer, ahead))
            next_place[peer] = place_of[message]
    before: list[list[Action]] = [[] for _ in range(len(computations) + 1)]
    for message in messages:
        before[place_of[message]].append(message)
    moved: list[Item] = []
    for number, computation in enumerate(computations):
        moved += [*before[number], computation]
    return moved + before[-1]
