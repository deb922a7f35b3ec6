"""Lowering of a compute schedule: adds communication, gradient reduction and the optimizer step.

Every message gets a position in one global order of the step; a row has one rank's items of it.
1f1b, pp=2, chunks=4:

    computations in time     0F0 0F1 1F0 1B0 0B0 ..        as they start if messages take no time; a pair as one   (1)
    with the messages        0F0 {0->1 F0} 0F1 1F0 1B0 {0->1 F1} {1->0 B0} 0B0 ..    each as late as possible:
                             before its sender's next computation, and before the one that uses it                 (2)
    row 0                    0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 ..      receives one computation earlier       (3)
    row 0, grouped           0F0 {0SEND_F0+0RECV_B0} 0F1 0SEND_F1 0B0 ..    adjacent messages are posted together  (4)

Such rows cannot deadlock, even if a send blocks until its receive is posted and the message has
arrived (rendezvous): the earliest unfinished item of the global order can always run. Messages
between two ranks arrive in the order in which they were sent. A posted receive blocks only the
computation that uses its value.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from meshwright.errors import ScheduleError
from meshwright.schedule.action import (
    COMMUNICATION,
    COMPUTE,
    RECEIVES,
    Action,
    Item,
    Kind,
    Schedule,
    actions_of,
)
from meshwright.schedule.ahead import post_ahead

_TICKS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


def lower(schedule: Schedule) -> Schedule:
    """Lower a compute schedule to one that runs: ``1F0 1B0`` -> ``{1RECV_F0+1RECV_B0} 1F0 1SEND_F0
    1B0 1SEND_B0 1REDUCE STEP``.

    REDUCE follows the stage's last backward and the messages right after it, so that no neighbour
    waits for a reduction. A faulty schedule is lowered too, without an error, so that ``check`` can
    report its faults. Raises :class:`ScheduleError` for a schedule that has been lowered already.
    """
    _check_not_lowered(schedule)
    rows: list[tuple[Item, ...]] = []
    order = _in_time(schedule)  # (1)
    for pp_rank, items in enumerate(_with_messages(schedule, order)):  # (2)
        ahead = post_ahead(schedule, items)  # (3)
        grouped = _fuse(ahead)  # (4)
        reduced = _with_reduce(grouped, schedule.last_backwards(pp_rank))
        rows.append((*reduced, Action(Kind.STEP)))
    return replace(schedule, rows=tuple(rows))


def _check_not_lowered(schedule: Schedule) -> None:
    for pp_rank in range(schedule.pp):
        for position, action in schedule.actions(pp_rank):
            if action.kind not in COMPUTE:
                raise ScheduleError(
                    "MW-SCHEDULE-016",
                    f"{schedule.name}: row {pp_rank}, position {position} holds {action}: this"
                    " schedule has been lowered already; lower the one that build() gives",
                )


def _in_time(schedule: Schedule) -> list[tuple[int, Item]]:
    """Return (rank, computation) in the order in which they start. (1)

    If rows wait for each other in a cycle, or for a value that no row computes, the first of them
    continues as if its input had arrived: ``check`` will report the receive without a partner, or
    the deadlock.
    """
    rows = schedule.rows
    positions, free_at = [0] * schedule.pp, [0] * schedule.pp  # of each rank
    sent_at: dict[Action, int] = {}
    waiting: dict[Action, int] = {}  # missing send -> the rank that waits for it
    started: list[tuple[int, int, Item]] = []
    to_visit = deque(range(schedule.pp))
    while to_visit or waiting:
        if not to_visit:  # a faulty schedule: see above
            send = min(waiting, key=lambda missing: waiting[missing])
            to_visit.append(waiting.pop(send))
            sent_at[send] = 0
        rank = to_visit.popleft()
        while positions[rank] < len(rows[rank]):
            item = rows[rank][positions[rank]]
            receives, sends = _messages_of(schedule, rank, item)
            inputs = [receive.partner() for receive in receives]
            missing = [send for send in inputs if send not in sent_at]
            if missing:
                waiting[missing[0]] = rank
                break
            start = max([free_at[rank], *(sent_at[send] for send in inputs)])
            started.append((start, rank, item))
            free_at[rank] = start + sum(_TICKS[action.kind] for action in actions_of(item))
            positions[rank] += 1
            for send in sends:
                if send not in sent_at:
                    sent_at[send] = free_at[rank]
                    if send in waiting:
                        to_visit.append(waiting.pop(send))
    started.sort(key=lambda start_rank_item: start_rank_item[:2])
    return [(rank, item) for _, rank, item in started]


def _messages_of(schedule: Schedule, rank: int, item: Item) -> tuple[list[Action], list[Action]]:
    """Return the messages that an item receives and sends;
    none for a computation that is not of this rank.
    """
    receives: list[Action] = []
    sends: list[Action] = []
    for action in actions_of(item):
        stage = action.stage
        if stage is None or stage >= schedule.num_stages or schedule.rank_of(stage) != rank:
            continue
        receive, send = schedule.receive_for(action), schedule.send_after(action)
        if receive is not None:
            receives.append(receive)
        if send is not None:
            sends.append(send)
    return receives, sends


def _with_messages(schedule: Schedule, order: list[tuple[int, Item]]) -> list[list[Item]]:
    """Return the rows, with both ends of each message at its place in the global order. (2)"""
    computed_at: dict[Action, int] = {}  # send -> position of its computation in the order
    used_at: dict[Action, int] = {}  # receive -> position of the computation that uses it
    following: dict[int, int] = {}  # position -> position of the same rank's next computation
    last_of_rank: dict[int, int] = {}
    for at, (rank, item) in enumerate(order):
        if rank in last_of_rank:
            following[last_of_rank[rank]] = at
        last_of_rank[rank] = at
        receives, sends = _messages_of(schedule, rank, item)
        for receive in receives:
            used_at.setdefault(receive, at)
        for send in sends:
            computed_at.setdefault(send, at)
    # position -> sends and receives to insert before it
    before: dict[int, list[Action]] = defaultdict(list)
    # As late as possible: a message stands just before the first computation that would wait for it,
    # on either rank, so that it delays no other.
    for send, at in computed_at.items():
        next_at = following.get(at, len(order))
        use_at = used_at.get(send.partner(), -1)
        if use_at > at:
            del used_at[send.partner()]
            before[min(next_at, use_at)] += [send, send.partner()]
        else:  # unused, or used before it is sent: a fault, which check() reports
            before[next_at].append(send)
    for receive, at in used_at.items():
        before[at].append(receive)
    rows: list[list[Item]] = [[] for _ in range(schedule.pp)]
    for at in range(len(order) + 1):
        for message in before[at]:
            assert message.stage is not None
            rows[schedule.rank_of(message.stage)].append(message)
        if at < len(order):
            rank, item = order[at]
            rows[rank].append(item)
    return rows


def _fuse(row: Iterable[Item]) -> list[Item]:
    """Fuse adjacent communications into one group, sends first; a single one stays an Action.
    (4)
    """
    fused: list[Item] = []
    for is_communication, run in groupby(row, key=_is_communication):
        items = list(run)
        if is_communication and len(items) > 1:
            messages = [action for item in items for action in actions_of(item)]
            messages.sort(key=lambda message: message.kind in RECEIVES)
            fused.append(tuple(messages))
        else:
            fused += items
    return fused


def _is_communication(item: Item) -> bool:
    return actions_of(item)[0].kind in COMMUNICATION


def _with_reduce(items: list[Item], last_backwards: frozenset[Action]) -> list[Item]:
    """Insert REDUCE after each last backward and the communication item that follows it, if any.
    Splits no group.
    """
    row: list[Item] = []
    due: list[Action] = []
    for item in items:
        if not _is_communication(item):
            row += due
            due = []
        row.append(item)
        due += [
            Action(Kind.REDUCE, action.stage)
            for action in actions_of(item)
            if action in last_backwards
        ]
    return row + due
