"""From what is computed to what is run: communication, the reduction of gradients and the optimizer step added.

Where a receive stands decides both the bubble and whether the ranks can hang. For 1F1B, 4 ranks, 8 micro-batches, in a
model where a receive blocks its rank and a send blocks until its receive is posted:

    receives as early as their senders' turns            bubble 46.7 %   (B twice as long as F)
    receives directly before they are needed (1),
      sends directly after they are made (2)             27.3 %, the ideal; but neighbours that both send first hang
    and neighbouring communications in one group,
      posted together (3)                                27.3 %, and nobody hangs
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from framework.errors import ScheduleError
from framework.schedule.action import COMMUNICATION, COMPUTE, Action, Item, Kind, Schedule, actions_of


def lower(schedule: Schedule) -> Schedule:
    """The schedule that runs: ``1F0 1B0`` -> ``1RECV_F0 1F0 {1SEND_F0+1RECV_B0} 1B0 1SEND_B0 1REDUCE STEP``.

    Each stage is reduced after its last backward, but not before what that backward has to send: the next rank waits
    for it. Raises :class:`ScheduleError` for a schedule that has been lowered already.
    """
    for pp_rank in range(schedule.pp):
        for position, action in schedule.actions(pp_rank):
            if action.kind not in COMPUTE:
                raise ScheduleError(
                    f"{schedule.name}: row {pp_rank}, position {position} holds {action}: this schedule has been "
                    f"lowered already; lower the one that build() gives"
                )
    return replace(schedule, rows=tuple(_lower_row(schedule, pp_rank) for pp_rank in range(schedule.pp)))


def _lower_row(schedule: Schedule, pp_rank: int) -> tuple[Item, ...]:
    items = _fuse(_with_communication(schedule, pp_rank))
    return (*_with_reduce(items, schedule.last_backwards(pp_rank)), Action(Kind.STEP))


def _with_communication(schedule: Schedule, pp_rank: int) -> list[Action]:
    row: list[Action] = []
    for _, action in schedule.actions(pp_rank):
        receive, send = schedule.receive_for(action), schedule.send_after(action)
        row += [] if receive is None else [receive]  # (1)
        row += [action]
        row += [] if send is None else [send]  # (2)
    return row


def _fuse(row: Iterable[Action]) -> list[Item]:
    """Runs of neighbouring communications become one group; one alone stays as it is. (3)"""
    items: list[Item] = []
    for action in row:
        if items and action.kind in COMMUNICATION and actions_of(items[-1])[0].kind in COMMUNICATION:
            items[-1] = (*actions_of(items[-1]), action)
        else:
            items.append(action)
    return items


def _with_reduce(items: list[Item], last_backwards: frozenset[Action]) -> list[Item]:
    """REDUCE behind each last backward and the communication that follows it: a group must not be torn apart."""
    row: list[Item] = []
    due: list[Action] = []
    for item in items:
        if actions_of(item)[0].kind not in COMMUNICATION:
            row += due
            due = []
        row.append(item)
        if isinstance(item, Action) and item in last_backwards:
            due = [Action(Kind.REDUCE, item.stage)]
    return row + due
