"""Who makes the others wait: a rank that has more to do than they have, a link, or sums over replicas.

    every step      each rank      note    seconds of its own: all until STEP in which it waited for nobody
    now and then    all ranks      look    which messages were waited for after they had been sent, on one clock
                    all            judge   from everyone's means since the look before

A rank is late by what it takes for itself more than the next slowest does: a slower device, a busy node, slow reading,
more layers. A wait for a message that has been sent is its link's; a wait in a sum that even the last rank to come to
it has is the sum's. The greatest of these is named when it is worth a tenth of the step. It is at most what would be
gained: some of a stage's waits are hidden by others'. Two ranks on two nodes that are as slow as each other hide each
other. What a rank does between STEP and the next row (the optimizer, tracking, validation) is not seen here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from meshwright.mesh.mesh import Mesh
from meshwright.mesh.rendezvous import in_short
from meshwright.pipeline.executor import RowResult
from meshwright.schedule.analysis.account import on_their_way
from meshwright.schedule.analysis.simulate import Timeline
from meshwright.tracking.tracker import warn_on_stderr, warn_quietly
from meshwright.watch.trace import RankSpans, on_one_clock

SHARE = 0.1
"""Of a step: what holds the others up for less is not named."""
WARM_UP = 1
"""Steps of a start that nobody counts."""


class Straggler(NamedTuple):
    """Who makes the others wait."""

    who: str
    """``rank 5 on h2``, ``the link between h1 and h2``, ``the sum of gradients over ranks 0, 2 on h1, h2``; empty:
    nobody does so for long enough to be named."""
    rank: int
    """Of a link: that sends; of a sum: the first."""
    held_s: float
    """For how long, in a step."""
    step_s: float
    why: str

    @property
    def share(self) -> float:
        """Of the step."""
        return self.held_s / self.step_s

    def __str__(self) -> str:
        return f"{self.who} makes the others wait, {self.held_s:.3g} s of a step of {self.step_s:.3g} s: {self.why}"


NOBODY = Straggler("", 0, 0.0, 1.0, "")


class StragglerReport(NamedTuple):
    """What a rank says of itself. Seconds of a step, means since the look before."""

    own_s: float
    reducing_s: tuple[float, ...]
    """Of each step."""
    replicas: tuple[int, ...]
    """The ranks that its gradients are summed over."""
    pp_rank: int
    on_their_way_s: dict[tuple[int, int], float]
    """Of (sending, receiving) rank; only the first of each pipeline says it."""


class Stragglers:
    """One rank's notes since the last look."""

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._mesh = mesh
        self._every = every if mesh.grid.size > 1 else 0
        self._num_steps = 0
        self._last = self._said = ""
        self._notes: list[tuple[float, float, float]] = []
        """(own, waited in sums, the step's) seconds of each step."""

    def due(self, step: int) -> bool:
        """Whether to look after this step: it must be aligned before."""
        return self._every > 0 and step % self._every == 0

    def note(self, result: RowResult | None, step_s: float) -> None:
        """A step was taken."""
        assert result is not None
        self._num_steps += 1
        if self._every and self._num_steps > WARM_UP:
            self._notes.append((result.own_s(), result.reducing_s(), step_s))

    def is_news(self, straggler: Straggler) -> bool:
        """Whether to say it: somebody whom the look before has found too, and who has not been said."""
        again, self._last = straggler.who == self._last, straggler.who
        if not again or straggler.who == self._said:
            return False
        self._said = straggler.who
        return bool(straggler.who)

    def look(self, pipeline: Sequence[RankSpans]) -> Straggler | None:
        """``pipeline``: what its ranks have seen of the last step. Every rank calls it; rank 0 gets the answer, if a
        step that counts was taken since the last."""
        if not self._notes:
            return None
        own, reducing, steps = zip(*self._notes, strict=True)
        self._notes.clear()
        mesh, step_s = self._mesh, mean(steps)
        messages_s = _messages(mesh, pipeline, step_s / steps[-1]) if mesh.pp.rank == 0 else {}
        mine = StragglerReport(mean(own), reducing, mesh.dp.ranks, mesh.pp.rank, messages_s)
        everyone: list[StragglerReport] = mesh.world.gather_objects(mine, StragglerReport)
        if mesh.rank != 0:
            return None
        try:
            return judge(everyone, mesh.nodes, step_s, alike=mesh.grid.tp if mesh.device.type == "cuda" else 1)
        except Exception as error:
            warn_quietly(warn_on_stderr, f"who makes the others wait cannot be told, the run goes on: {error!r}")
            return None


def _messages(mesh: Mesh, pipeline: Sequence[RankSpans], scale: float) -> dict[tuple[int, int], float]:
    """By global ranks, of a mean step; what two clocks may be off by is taken from each message. Cannot fail: all ranks
    go on to the same gathering."""
    try:
        spans, _, error_s = on_one_clock(pipeline)
        found = on_their_way(Timeline("", spans), at_least=error_s)
    except Exception as error:
        warn_quietly(warn_on_stderr, f"the messages of a step cannot be accounted for, the run goes on: {error!r}")
        return {}
    ranks = mesh.pp.ranks
    return {(ranks[sender], ranks[receiver]): scale * seconds for (sender, receiver), seconds in found.items()}


def judge(everyone: Sequence[StragglerReport], nodes: Sequence[str], step_s: float, *, alike: int = 1) -> Straggler:
    """The greatest hold-up, if it is one. ``everyone``: by rank. ``alike``: so many neighbours cannot be told apart,
    since their times have the waits for each other in them. Pure.
    """
    found = [_rank(everyone, nodes, step_s, alike), _link(everyone, nodes, step_s), _sums(everyone, nodes, step_s)]
    worst = max((each for each in found if each is not None), key=lambda each: each.held_s, default=NOBODY)
    return worst if worst.share >= SHARE else NOBODY


def _rank(everyone: Sequence[StragglerReport], nodes: Sequence[str], step_s: float, alike: int) -> Straggler | None:
    """What would be gained if the slowest rank were as fast as the next; or, where a whole node is slow, that node."""
    slowest = max(range(len(everyone)), key=lambda rank: everyone[rank].own_s)
    first = slowest - slowest % alike
    beside_s = [told.own_s for rank, told in enumerate(everyone) if not first <= rank < first + alike]
    elsewhere_s = [told.own_s for told, node in zip(everyone, nodes, strict=False) if node != nodes[slowest]]
    if not beside_s:
        return None
    own_s, next_s = everyone[slowest].own_s, max(beside_s)
    who = f"rank {slowest} on {nodes[slowest]}"
    if alike > 1:
        who = f"one of the tensor-parallel ranks {first}..{first + alike - 1} on {nodes[slowest]}"
    if elsewhere_s and own_s - next_s < (own_s - max(elsewhere_s)) / 2:
        who, next_s = f"the node {nodes[slowest]}", max(elsewhere_s)
    why = f"it takes {own_s:.3g} s for itself, the next {next_s:.3g} s"
    same_stages = [told.own_s for told in everyone if told.pp_rank == everyone[slowest].pp_rank]
    if len({told.pp_rank for told in everyone}) > 1 and min(same_stages) > next_s:
        why += ", as do all that have its stages: it, or the cut (`meshwright stages`)"
    return Straggler(who, slowest, own_s - next_s, step_s, why)


def _link(everyone: Sequence[StragglerReport], nodes: Sequence[str], step_s: float) -> Straggler | None:
    waits_s = {ranks: seconds for told in everyone for ranks, seconds in told.on_their_way_s.items()}
    if not waits_s:
        return None
    sender, receiver = max(waits_s, key=waits_s.__getitem__)
    held_s = waits_s[sender, receiver]
    if nodes[sender] == nodes[receiver]:
        who = f"the way from rank {sender} to rank {receiver} on {nodes[sender]}"
    else:
        pairs = _by_pair(waits_s, nodes)
        slow = [pair for pair, seconds in pairs if seconds >= held_s / 2]
        common = set.intersection(*slow)
        who = f"the link between {' and '.join(sorted({nodes[sender], nodes[receiver]}))}"
        if len(slow) > 1 and len(slow) == len(pairs):  # one of them, or all: nothing to tell it by
            who = "the network between the nodes"
        elif len(slow) > 1 and len(common) == 1:
            who = f"the link of {common.pop()}"
    why = f"messages from rank {sender} to rank {receiver} had been sent, and were on their way"
    return Straggler(who, sender, held_s, step_s, why)


def _by_pair(waits_s: dict[tuple[int, int], float], nodes: Sequence[str]) -> list[tuple[set[str], float]]:
    """The longest of each two nodes."""
    found: dict[frozenset[str], float] = defaultdict(float)
    for (sender, receiver), seconds in waits_s.items():
        pair = frozenset({nodes[sender], nodes[receiver]})
        if len(pair) == 2:
            found[pair] = max(found[pair], seconds)
    return [(set(pair), seconds) for pair, seconds in found.items()]


def _sums(everyone: Sequence[StragglerReport], nodes: Sequence[str], step_s: float) -> Straggler | None:
    """In each step the last to come to a sum waits for nobody: what it waits is the sum."""
    groups: dict[tuple[int, ...], list[tuple[float, ...]]] = defaultdict(list)
    for told in everyone:
        if len(told.replicas) > 1:
            groups[told.replicas].append(told.reducing_s)
    shortest = {ranks: mean(map(min, zip(*waits, strict=True))) for ranks, waits in groups.items()}
    if not shortest:
        return None
    ranks = max(shortest, key=shortest.__getitem__)
    hosts = in_short(list(dict.fromkeys(nodes[rank] for rank in ranks)))
    who = f"the sum of gradients over ranks {in_short(ranks)} on {hosts}"
    return Straggler(who, ranks[0], shortest[ranks], step_s, "so long even the last to come to it waits")
