"""Search for deadlocks: run the recorded communication of the ranks against each other,
without time.

Each operation blocks until all its ranks have posted it. These are the strictest semantics: a send
blocks until its receive is posted. A receive blocks where its value is used, as in the executor.
Only the columns (ranks with the same dp and tp) of deviating ranks are run, and one more along each
axis.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from meshwright.mesh import Coordinates
from meshwright.schedule.action import Action
from meshwright_plan.dryrun.groups import GroupViews, Ranks, folded, format_ranks
from meshwright_plan.dryrun.job import Job

MAX_LISTED = 6
"""Largest number of blocked ranks that are described."""


class _BlockingCall(NamedTuple):
    """Messages that a rank posts together, one collective, or the use of a received value."""

    activity: object
    sends: tuple[int, ...]
    """Ranks to which it sends."""
    receives: tuple[int, ...]
    """Ranks from which it receives; these do not block it."""
    group: Ranks
    """Ranks of the collective; empty for messages."""
    uses: tuple[int, int] | None = None
    """(source, number) of the last message that must have arrived."""


def find_deadlock(job: Job, views: GroupViews) -> tuple[Ranks, str] | None:
    """Return (blocked ranks, description); None if every rank reaches its end."""
    ranks = _ranks_to_run(job)
    run = _Run(job, {rank: _blocking_calls(job, views, rank) for rank in ranks})
    run.finish()
    blocked = [rank for rank in ranks if run.current(rank) is not None]
    if not blocked:
        return None
    lines = []
    for rank in blocked[:MAX_LISTED]:
        call = run.current(rank)
        assert call is not None
        peers = sorted({*call.sends, *(call.uses or ())[:1]}) or [
            member for member in call.group if member != rank
        ]
        lines.append(f"rank {rank} in {call.activity} for {format_ranks(peers)}")
    more = f", and {len(blocked) - MAX_LISTED} more" if len(blocked) > MAX_LISTED else ""
    return tuple(blocked), f"these ranks block forever: {'; '.join(lines)}{more}"


def _ranks_to_run(job: Job) -> list[int]:
    grid = folded(job.grid)
    deviating = [grid.coordinates(rank) for rank in job.own_profiles]
    dps, tps = {at.dp_rank for at in deviating} or {0}, {at.tp_rank for at in deviating} or {0}
    if deviating:
        dps |= {_smallest_other(dps, grid.dp)}
        tps |= {_smallest_other(tps, grid.tp)}
    return [
        grid.rank(Coordinates(pp_rank=p, dp_rank=d, tp_rank=t))
        for p in range(grid.pp)
        for d in sorted(dps)
        for t in sorted(tps)
    ]


def _smallest_other(indices: set[int], degree: int) -> int:
    return next((index for index in range(degree) if index not in indices), 0)


def _blocking_calls(job: Job, views: GroupViews, rank: int) -> list[_BlockingCall]:
    """Return the calls of a rank in order. A receive blocks in a call of its own,
    where its value is used.
    """
    profile, calls = job.profile_of(rank), []
    starts = deque(peak.activity for peak in profile.peaks)
    uses: dict[Action, tuple[int, int]] = {}
    received: Counter[int] = Counter()

    def begin(activity: object) -> None:
        while starts and starts[0] is not activity:
            earlier = starts.popleft()
            if isinstance(earlier, Action) and earlier in uses:
                calls.append(_BlockingCall(earlier, (), (), (), uses.pop(earlier)))

    in_activity = groupby(
        profile.communication, key=lambda r: id(r.activity) if r.call.peer is not None else None
    )
    for message_key, run in in_activity:
        records = list(run)
        begin(records[0].activity)
        if message_key is None:
            for record in records:
                begin(record.activity)
                calls.append(
                    _BlockingCall(
                        record.activity, (), (), views.group(record.call.group, profile, rank)
                    )
                )
            continue
        peers = [(record.call.operation, views.peer(record, rank)) for record in records]
        sends, receives = (
            tuple(p for o, p in peers if o == operation) for operation in ("send", "receive")
        )
        calls.append(_BlockingCall(records[0].activity, sends, receives, ()))
        sources = iter(receives)
        for action, tensors in _received(records[0].activity):
            for source in islice(sources, tensors):
                received[source] += 1
                uses[action] = source, received[source]
    begin(None)
    return calls


def _received(activity: Any) -> Iterator[tuple[Action, int]]:
    """Yield (receive, number of its tensors) of messages that are posted together."""
    for message in (
        activity if isinstance(activity, tuple) and not isinstance(activity, Action) else ()
    ):
        if message.received is not None:
            yield message.action, len(message.received)


class _Run:
    """Run of several ranks at once, without time."""

    def __init__(self, job: Job, calls: dict[int, list[_BlockingCall]]) -> None:
        self._size, self._calls = job.grid.size, calls
        self._position = dict.fromkeys(calls, 0)
        self._posted: dict[tuple[int, int, bool], int] = defaultdict(int)
        """(source, destination, is a send) -> number of these posted."""
        self._awaited: dict[int, list[tuple[tuple[int, int, bool], int]]] = {}
        """Rank that has posted its current call -> other ends,
        each with the number that has to be posted.
        """
        self._arrived: dict[Ranks, dict[int, int]] = defaultdict(dict)
        """Group -> number of its collectives that each rank has reached."""

    def current(self, rank: int) -> _BlockingCall | None:
        """Return the call at which a rank is; None at its end."""
        position = self._position[rank]
        return self._calls[rank][position] if position < len(self._calls[rank]) else None

    def finish(self) -> None:
        """Run all ranks until each is at its end or blocked."""
        waiting = deque(self._calls)
        while waiting:
            rank = waiting.popleft()
            while (call := self.current(rank)) is not None:
                if rank not in self._awaited:
                    waiting.extend(self._post(rank, call))
                if not self._is_complete(rank, call):
                    break
                del self._awaited[rank]
                self._position[rank] += 1

    def _members(self, group: Ranks) -> Sequence[int]:
        return (
            [r for r in group if r in self._calls] if len(group) < self._size else list(self._calls)
        )

    def _post(self, rank: int, call: _BlockingCall) -> list[int]:
        """Post a call; return the ranks that this may unblock."""
        self._awaited[rank] = []
        if call.group:
            arrived = self._arrived[call.group]
            arrived[rank] = arrived.get(rank, 0) + 1
            return [member for member in self._members(call.group) if member != rank]
        ends = [(rank, peer, True) for peer in call.sends] + [
            (peer, rank, False) for peer in call.receives
        ]
        for source, destination, is_send in ends:
            self._posted[source, destination, is_send] += 1
            if is_send:
                number = self._posted[source, destination, True]
                self._awaited[rank].append(((source, destination, False), number))
        if call.uses is not None:
            source, number = call.uses
            self._awaited[rank].append(((source, rank, True), number))
        return [*call.sends, *call.receives]

    def _is_complete(self, rank: int, call: _BlockingCall) -> bool:
        if call.group:
            arrived = self._arrived[call.group]
            return all(
                arrived.get(member, 0) >= arrived[rank] for member in self._members(call.group)
            )
        return all(self._posted[end] >= number for end, number in self._awaited[rank])
