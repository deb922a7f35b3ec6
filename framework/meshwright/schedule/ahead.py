"""Receives posted one computation ahead, so that a message is in flight while its receiver computes.

    as late as can be         1F0 1B0 {1SEND_B0+1RECV_F1} 1F1       1F1 waits for the whole transfer of its input
    one computation ahead     1F0 1RECV_F1 1B0 1SEND_B0 1F1         the input arrives during 1B0

The order of receives on each link does not change, because messages on a link are matched in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule.action import COMPUTE, RECEIVES, Action, Item, Schedule, actions_of


def post_ahead(schedule: Schedule, row: Sequence[Item]) -> list[Item]:
    """Move each receive of a row before the computation that precedes its use, unless it is there or earlier already.

    A pair counts as one computation. Messages are not grouped yet.
    """
    messages = [item for item in row if isinstance(item, Action) and item.kind not in COMPUTE]
    computations = [item for item in row if actions_of(item)[0].kind in COMPUTE]
    used_in = {schedule.receive_for(a): number for number, item in enumerate(computations) for a in actions_of(item)}
    places: dict[Action, int] = {}  # message -> number of the computation after it
    number = 0
    for item in row:
        if isinstance(item, Action) and item.kind not in COMPUTE:
            places[item] = number
        else:
            number += 1
    following: dict[int, int] = {}  # peer -> place of the next receive on its link
    for action in reversed(messages):
        if action.kind in RECEIVES:
            ahead = max(0, used_in.get(action, places[action] + 1) - 1)
            peer = schedule.peer(action)
            following[peer] = places[action] = min(places[action], ahead, following.get(peer, ahead))
    before: list[list[Action]] = [[] for _ in range(len(computations) + 1)]
    for action in messages:
        before[places[action]].append(action)
    pairs = zip(before, [*computations, None], strict=True)
    return [item for found, computation in pairs for item in (*found, computation) if item is not None]
