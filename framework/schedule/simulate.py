"""Time, added to a schedule: what a simulator says or what clocks have read, in one type.

The simulator is a row of ranks that each do one item after the other. A computation takes its cost. A group of
communications is posted at once and holds its rank until all of it is done; message k of a channel, an ordered pair of
ranks, is the k-th send and the k-th receive posted on it, whatever they call themselves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from framework.errors import ScheduleError
from framework.schedule.action import COMMUNICATION, COMPUTE, LAST_HALVES, SENDS, Action, Kind, Schedule, actions_of


class Channel(StrEnum):
    """What a send waits for."""

    RENDEZVOUS = "rendezvous"
    """Until its receive is posted: the harshest, and what NCCL and large messages do."""
    BUFFERED = "buffered"
    """For nothing."""


class Costs(NamedTuple):
    """Seconds, or ticks, of each kind of action for one stage. ``comm``: of one message, on its way or in a group."""

    f: float = 1.0
    b: float = 2.0
    i: float = 1.0
    w: float = 1.0
    comm: float = 0.0
    reduce: float = 0.0
    step: float = 0.0

    def of(self, kind: Kind) -> float:
        """The cost of a kind."""
        if kind in COMMUNICATION:
            return self.comm
        return {
            Kind.F: self.f,
            Kind.B: self.b,
            Kind.I: self.i,
            Kind.W: self.w,
            Kind.REDUCE: self.reduce,
            Kind.STEP: self.step,
        }[kind]


class Span(NamedTuple):
    """An action of the pipeline rank ``rank`` with its begin and end, in seconds or ticks of one clock."""

    rank: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """One step in time, simulated or measured: of all ranks, or of those that are there."""

    name: str
    spans: tuple[Span, ...]
    """Each rank's in the order in which it did them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline ranks that have spans."""
        return tuple(sorted({span.rank for span in self.spans}))


class Blocked(NamedTuple):
    """A rank that can never go on: at ``position`` of its row the communication ``action`` finds no partner."""

    rank: int
    position: int
    action: Action


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs], channel: Channel = Channel.RENDEZVOUS) -> Timeline:
    """The timeline of a lowered schedule. ``costs``: of every stage alike, or one per stage.

    A message takes the ``comm`` of its sending stage; the STEP of a rank the sum over its stages. Raises
    :class:`ScheduleError` for a schedule that is not lowered (nobody would wait for anybody) or that hangs.
    """
    if any(not row or row[-1] != Action(Kind.STEP) for row in schedule.rows):
        raise ScheduleError(f"{schedule.name}: a row does not end with STEP: lower() the schedule, then simulate it")
    timeline, blocked = play(schedule, costs, channel)
    if blocked:
        where = ", ".join(f"rank {rank} at position {position} ({action})" for rank, position, action in blocked)
        raise ScheduleError(f"{schedule.name} hangs with {channel} sends: {where}. check() says why")
    return timeline


def play(schedule: Schedule, costs: Costs | Sequence[Costs], channel: Channel) -> tuple[Timeline, tuple[Blocked, ...]]:
    """Run as far as it goes: the timeline so far, and the ranks that are stuck (none when all rows were done).

    What comes out does not depend on the order in which ranks are looked at: channels are in order and no rank chooses.
    """
    per_stage = _per_stage(schedule, costs)
    clocks = [0.0] * schedule.pp
    positions = [0] * schedule.pp
    spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
    posted: dict[tuple[int, int, bool], list[float]] = defaultdict(list)  # (source, destination, is a send): when
    numbers: list[list[int]] = [[] for _ in range(schedule.pp)]  # of the posted group's actions, on their channels

    def post(rank: int, group: tuple[Action, ...]) -> None:
        for action in group:
            entries = posted[_end(schedule, rank, action)]
            numbers[rank].append(len(entries))
            entries.append(clocks[rank])
            to_visit.append(schedule.peer(action))

    def finished(rank: int, group: tuple[Action, ...]) -> list[Span] | Action:
        """The spans of a posted group, or the first action of it that still waits for its partner."""
        done = []
        for action, number in zip(group, numbers[rank], strict=True):
            source, destination, is_send = _end(schedule, rank, action)
            others = posted[source, destination, not is_send]
            if is_send and channel is Channel.BUFFERED:
                done.append(Span(rank, action, clocks[rank], clocks[rank]))
            elif number >= len(others):
                return action
            else:
                sender = action if is_send else action.partner()
                leaves_at = max(clocks[rank], others[number]) if channel is Channel.RENDEZVOUS else others[number]
                arrives_at = leaves_at + per_stage[sender.stage].comm
                done.append(Span(rank, action, clocks[rank], max(clocks[rank], arrives_at)))
        return done

    blocked: dict[int, Blocked] = {}
    to_visit = deque(range(schedule.pp))
    while to_visit:
        rank = to_visit.popleft()
        blocked.pop(rank, None)
        while positions[rank] < len(schedule.rows[rank]):
            group = actions_of(schedule.rows[rank][positions[rank]])
            if group[0].kind in COMMUNICATION:
                if not numbers[rank]:
                    post(rank, group)
                done = finished(rank, group)
                if isinstance(done, Action):
                    blocked[rank] = Blocked(rank, positions[rank], done)
                    break
                numbers[rank] = []
            else:
                is_step = group[0].kind is Kind.STEP
                stages = schedule.stages_of(rank) if is_step else (group[0].stage,)
                cost = sum(per_stage[stage].of(group[0].kind) for stage in stages)
                done = [Span(rank, group[0], clocks[rank], clocks[rank] + cost)]
            spans[rank] += done
            clocks[rank] = max(span.end for span in done)
            positions[rank] += 1
    timeline = Timeline(schedule.name, tuple(span for row in spans for span in row))
    return timeline, tuple(blocked[rank] for rank in sorted(blocked))


def _end(schedule: Schedule, rank: int, action: Action) -> tuple[int, int, bool]:
    """The rank's end of the channel that a communication goes through: (source, destination, is a send)."""
    peer = schedule.peer(action)
    return (rank, peer, True) if action.kind in SENDS else (peer, rank, False)


def _per_stage(schedule: Schedule, costs: Costs | Sequence[Costs]) -> Mapping[int | None, Costs]:
    if isinstance(costs, Costs):
        return defaultdict(lambda: costs)
    assert len(costs) == schedule.num_stages, (len(costs), schedule.num_stages)
    return dict(enumerate(costs))


def bubble_share(timeline: Timeline) -> float:
    """The share of the ranks' total time in which they compute nothing, 0..1: (pp-1) / (chunks+pp-1) for 1F1B, GPipe.

    Total time (not the ideal time, the literature's other denominator) is from the first forward's start to the last
    backward's end, times the ranks that are there: waiting and communication are idle in it, REDUCE and STEP neither
    lengthen nor fill it.
    """
    computed = [span for span in timeline.spans if span.action.kind in COMPUTE]
    assert computed, f"{timeline.name}: nothing computed in {len(timeline.spans)} spans"
    total = (max(span.end for span in computed) - min(span.start for span in computed)) * len(timeline.ranks)
    busy = sum(span.end - span.start for span in computed)
    return (total - busy) / total if total > 0 else 0.0


def peak_activations(of: Schedule | Timeline) -> tuple[int, ...]:
    """For each rank the most micro-batches whose activations it holds at once: from F to B or, split, to W.

    A micro-batch counts once per stage of the rank. ``min(pp - rank, chunks)`` for 1F1B, ``chunks`` for GPipe.
    """
    if isinstance(of, Schedule):
        rows = [[action for _, action in of.actions(rank)] for rank in range(of.pp)]
    else:
        rows = [[span.action for span in of.spans if span.rank == rank] for rank in of.ranks]
    return tuple(_peak(row) for row in rows)


def _peak(actions: Iterable[Action]) -> int:
    held = peak = 0
    for action in actions:
        held += (action.kind is Kind.F) - (action.kind in LAST_HALVES)
        peak = max(peak, held)
    return peak
