"""Simulator of schedules: the time of each action, from the cost of each kind.

Each rank runs the items of its row one after the other. A computation takes its cost. Message k of
a channel, an ordered pair of ranks, is the k-th send and the k-th receive posted on it, whatever
their actions are. The type of channel determines what a communication blocks:

    row           1RECV_F0   1F0   {1SEND_F0+1RECV_B0}   1W7     1B0
    rendezvous          waits for 1RECV_F0   waits for the send     waits for 1RECV_B0     the harshest
    buffered            waits for 1RECV_F0                          waits for 1RECV_B0     as the executor
    links               as buffered; but a message leaves when both its ends are posted and its link is free
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.errors import ScheduleError
from meshwright.schedule.action import COMMUNICATION, SENDS, Action, Kind, Schedule, actions_of
from meshwright.schedule.analysis.pairs import Part, pair_spans, parts_of
from meshwright.schedule.analysis.timeline import Span, Timeline, name_of
from meshwright.schedule.lower import lower


class Channel(StrEnum):
    """Blocking behaviour of communications in a row."""

    RENDEZVOUS = "rendezvous"
    """A send blocks its rank until its receive is posted and the message has arrived; a receive
    blocks the computation that uses it. A schedule that runs so runs on any transport.
    """
    BUFFERED = "buffered"
    """A send blocks nothing; a receive blocks the computation
    that uses it until ``comm`` after the send.
    """
    LINKS = "links"
    """As buffered, but a message starts when both ends are posted and earlier ones have arrived:
    NCCL on links.
    """


class Costs(NamedTuple):
    """Seconds, or ticks, of each kind of action for one stage.

    ``comm``: transfer time of one message.
    """

    f: float = 1.0
    b: float = 2.0
    i: float = 1.0
    w: float = 1.0
    comm: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    exchanges: float = 0
    """Number of expert all-to-alls in F, and in B or I; f, b and i include their time,
    which a pair hides.
    """
    exchange_f: float = 0.0
    exchange_b: float = 0.0
    """Seconds of all of them in B or I; ``exchange_f``: in F."""

    def of(self, kind: Kind) -> float:
        """Return the cost of a kind."""
        cost: float = self.comm if kind in COMMUNICATION else getattr(self, kind.lower())
        return cost

    def parts(self, kind: Kind) -> list[Part]:
        """Return F, B or I as parts between exchanges."""
        return parts_of(
            self.of(kind),
            int(self.exchanges),
            self.exchange_f if kind is Kind.F else self.exchange_b,
        )


class BlockedRank(NamedTuple):
    """A rank that can never go on: at ``position`` of its row the communication ``action`` finds no
    partner.
    """

    rank: int
    position: int
    action: Action


TICKS = Costs(f=1, b=1, i=1, w=1)
"""One tick for each computation, B too: every computation is one cell of a picture."""


def timeline_of(schedule: Schedule, costs: Costs | Sequence[Costs] = TICKS) -> Timeline:
    """Simulate a schedule, lowered or not; name the timeline with the schedule's size."""
    return simulate(schedule if schedule.is_lowered else lower(schedule), costs)._replace(
        name=name_of(schedule)
    )


def simulate(
    schedule: Schedule, costs: Costs | Sequence[Costs], channel: Channel = Channel.BUFFERED
) -> Timeline:
    """Simulate a lowered schedule. ``costs``: the same for every stage, or one per stage.

    A message takes the ``comm`` of its sending stage; the STEP of a rank the sum over its stages.
    With buffered sends the span of a receive is the time for which the computation that uses it
    waited (of no length if it had arrived), just before that computation.

    Raises:
        ScheduleError: the schedule is not lowered (no rank would wait for another), or it hangs.
    """
    if any(not row or row[-1] != Action(Kind.STEP) for row in schedule.rows):
        raise ScheduleError(
            "MW-SCHEDULE-006",
            f"{schedule.name}: a row does not end with STEP: lower() the schedule, then"
            " simulate it",
        )
    timeline, blocked = play(schedule, costs, channel)
    if blocked:
        where = ", ".join(
            f"rank {rank} at position {position} ({action})" for rank, position, action in blocked
        )
        raise ScheduleError(
            "MW-SCHEDULE-007", f"{schedule.name} hangs with {channel} sends: {where}. See check()"
        )
    return timeline


def play(
    schedule: Schedule, costs: Costs | Sequence[Costs], channel: Channel
) -> tuple[Timeline, tuple[BlockedRank, ...]]:
    """Run a schedule as far as possible: return the timeline,
    and the ranks that are stuck (none if all rows ended).

    The result does not depend on the order in which ranks are visited: channels are in order and no
    rank chooses.
    """
    machine = _Machine(schedule, _per_stage(schedule, costs), channel)
    blocked: dict[int, BlockedRank] = {}
    machine.to_visit.extend(range(schedule.pp))
    while machine.to_visit:
        rank = machine.to_visit.popleft()
        blocked.pop(rank, None)
        while machine.positions[rank] < len(schedule.rows[rank]):
            missing = machine.go_on(rank)
            if missing is not None:
                blocked[rank] = BlockedRank(rank, machine.positions[rank], missing)
                break
    timeline = Timeline(
        schedule.name, tuple(span for rank in range(schedule.pp) for span in machine.spans[rank])
    )
    return timeline, tuple(blocked[rank] for rank in sorted(blocked))


@dataclass
class _Machine:
    """State of a simulation: the position of each rank in its row,
    and the messages between them.
    """

    schedule: Schedule
    per_stage: Mapping[int | None, Costs]
    channel: Channel
    clocks: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    positions: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    spans: defaultdict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    posted: defaultdict[tuple[int, int, bool], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(source, destination, is a send) -> times of posting, in order."""
    numbers: defaultdict[int, dict[Action, int]] = field(default_factory=lambda: defaultdict(dict))
    """Rank -> communication that is posted and not awaited yet -> its number on its channel."""
    ends: defaultdict[tuple[int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(source, destination) -> end times of the messages of a link."""
    takes: defaultdict[tuple[int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(source, destination) -> transfer time of each message."""
    has_posted: set[int] = field(default_factory=set)
    """Ranks that have posted the communications at their position and are blocked by them."""
    to_visit: deque[int] = field(default_factory=deque)
    """Ranks that may be able to continue."""

    def go_on(self, rank: int) -> Action | None:
        """Run the next item of a rank, or return the communication that blocks it."""
        group = actions_of(self.schedule.rows[rank][self.positions[rank]])
        is_communication = group[0].kind in COMMUNICATION
        if is_communication and rank not in self.has_posted:
            self.post(rank, group)
        spans = []
        for action in self.awaited(rank, group):
            end = self.end_of(rank, action)
            if end is None:
                return action
            spans.append(Span(rank, action, self.clocks[rank], max(self.clocks[rank], end)))
        for span in spans:
            self.numbers[rank].pop(span.action, None)
            self.clocks[rank] = max(self.clocks[rank], span.end)
        start = self.clocks[rank]
        if not is_communication:
            spans += self.computed(rank, group)
            self.clocks[rank] = spans[-1].end
        elif self.channel is not Channel.RENDEZVOUS:
            spans += [Span(rank, action, start, start) for action in group if action.kind in SENDS]
        self.spans[rank] += spans
        self.has_posted.discard(rank)
        self.positions[rank] += 1
        return None

    def post(self, rank: int, group: tuple[Action, ...]) -> None:
        """Post communications together; their peers are visited again."""
        for action in group:
            times = self.posted[self.channel_end(rank, action)]
            self.numbers[rank][action] = len(times)
            times.append(self.clocks[rank])
            if action.kind in SENDS:
                self.takes[rank, self.schedule.peer(action)].append(
                    self.per_stage[action.stage].comm
                )
            self.to_visit.append(self.schedule.peer(action))
        self.has_posted.add(rank)

    def awaited(self, rank: int, group: tuple[Action, ...]) -> list[Action]:
        """Return the communications that block a rank at an item of its row. Skips receives that
        were never posted: check() reports them.
        """
        if group[0].kind in COMMUNICATION:
            if self.channel is not Channel.RENDEZVOUS:
                return []
            return [message for message in group if message.kind in SENDS]
        receives = [self.schedule.receive_for(action) for action in group]
        return [
            receive for receive in receives if receive is not None and receive in self.numbers[rank]
        ]

    def end_of(self, rank: int, action: Action) -> float | None:
        """Return the end time of a posted communication;
        None as long as its partner is not posted.
        """
        source, destination, is_send = self.channel_end(rank, action)
        sent = self.posted[source, destination, True]
        received = self.posted[source, destination, False]
        number = self.numbers[rank][action]
        if number >= len(received if is_send else sent):
            return None
        takes = self.per_stage[(action if is_send else action.partner()).stage].comm
        if self.channel is Channel.LINKS:
            return self.end_on_link(source, destination, number)
        leaves_at = sent[number]
        if self.channel is Channel.RENDEZVOUS:
            leaves_at = max(leaves_at, received[number])
        return leaves_at + takes

    def end_on_link(self, source: int, destination: int, number: int) -> float:
        """Return the end time of a message that follows all earlier ones of its link;
        both ends are posted.
        """
        ends, takes = self.ends[source, destination], self.takes[source, destination]
        sent = self.posted[source, destination, True]
        received = self.posted[source, destination, False]
        for later in range(len(ends), number + 1):
            ends.append(max(sent[later], received[later], ends[-1] if ends else 0.0) + takes[later])
        return ends[number]

    def channel_end(self, rank: int, action: Action) -> tuple[int, int, bool]:
        """Return the rank's end of the channel of a communication: (source, destination,
        is a send).
        """
        peer = self.schedule.peer(action)
        return (rank, peer, True) if action.kind in SENDS else (peer, rank, False)

    def computed(self, rank: int, group: tuple[Action, ...]) -> list[Span]:
        """Return the spans of an item other than a communication,
        from this rank's present time on.
        """
        action, start = group[0], self.clocks[rank]
        if len(group) > 1:
            return pair_spans(
                rank, group, start, [self.per_stage[each.stage].parts(each.kind) for each in group]
            )
        stages = self.schedule.stages_of(rank) if action.kind is Kind.STEP else (action.stage,)
        return [
            Span(
                rank,
                action,
                start,
                start + sum(self.per_stage[stage].of(action.kind) for stage in stages),
            )
        ]


def _per_stage(schedule: Schedule, costs: Costs | Sequence[Costs]) -> Mapping[int | None, Costs]:
    if isinstance(costs, Costs):
        return defaultdict(lambda: costs)
    assert len(costs) == schedule.num_stages, (len(costs), schedule.num_stages)
    return dict(enumerate(costs))
