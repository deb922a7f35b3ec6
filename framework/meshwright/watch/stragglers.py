"""Straggler search: a rank with more work than the others, a slow link,
or a slow all-reduce of gradients.

    every step      each rank      record    busy seconds: the time before STEP in which the rank waited for no other
    every N steps   all ranks      search    waits for messages that had already been sent, on one clock
                    rank 0         judge     the means of all ranks since the last search

A rank's delay is its busy time minus that of the next slowest rank: a slower device, a busy node,
slow data reading, more layers. The wait for a message that is already sent is the delay of its
link. The wait of the last rank to enter a gradient sum is the delay of the sum. The greatest delay
is reported if it is at least a tenth of the step.

The delay is an upper bound of the gain, because some waits of a stage are hidden by waits of
others. Two equally slow ranks on two nodes hide each other. The time between STEP and the next row
(optimizer, tracking, validation) is not measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from meshwright.mesh.mesh import Mesh
from meshwright.pipeline.executor import RowResult
from meshwright.schedule.analysis import Timeline, on_their_way
from meshwright.terminal.output import abridge, tell
from meshwright.watch.trace import RankSpans, on_one_clock

SHARE = 0.1
"""Smallest share of a step that a delay must have to be reported."""
SLOW_TOO = 0.125
"""Smallest wait between two nodes, as a share of the longest wait, that counts as slow too: two
connections over one host's link share its bandwidth unevenly.
"""
WARM_UP = 1
"""First steps of each start that are not measured."""


class Straggler(NamedTuple):
    """The rank, link or gradient sum that delays the other ranks most."""

    name: str
    """``rank 5 on h2``, ``the link between h1 and h2``, ``the sum of gradients over ranks 0, 2 on
    h1, h2``; empty if no delay is long enough.
    """
    rank: int
    """Global rank: the straggler, the sender of a slow link, or the first rank of a slow sum."""
    delay_s: float
    """Seconds of delay per step."""
    step_s: float
    why: str

    @property
    def share(self) -> float:
        """Share of the step that the delay takes."""
        return self.delay_s / self.step_s

    def __str__(self) -> str:
        return (
            f"{self.name} makes the others wait, {self.delay_s:.3g} s of a step of"
            f" {self.step_s:.3g} s: {self.why}"
        )


NO_STRAGGLER = Straggler("", 0, 0.0, 1.0, "")


class StragglerReport(NamedTuple):
    """Measurements of one rank since the last search, in seconds per step."""

    busy_s: float
    reducing_s: tuple[float, ...]
    """Waits in gradient sums, one for each step."""
    replicas: tuple[int, ...]
    """Global ranks that this rank's gradients are summed over."""
    pp_rank: int
    in_flight_s: dict[tuple[int, int], float]
    """Waits for sent messages by global (sender, receiver);
    filled on the first rank of each pipeline alone.
    """


class Stragglers:
    """Straggler search of one rank: its measurements since the last search, and the last result."""

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._mesh = mesh
        self._every = every if mesh.grid.size > 1 else 0
        self._num_steps = 0
        self._last = self._reported = ""
        self._times: list[tuple[float, float, float]] = []
        """Seconds of each step: (busy, waited in gradient sums, whole step)."""

    def is_due(self, step: int) -> bool:
        """Check whether a search is due after this step;
        the ranks must be aligned before the step.
        """
        return self._every > 0 and step % self._every == 0

    def record(self, result: RowResult | None, step_s: float) -> None:
        """Record the times of a step that was taken."""
        assert result is not None
        self._num_steps += 1
        if self._every and self._num_steps > WARM_UP:
            self._times.append((result.times.own_s(), result.times.reducing_s(), step_s))

    def should_report(self, straggler: Straggler) -> bool:
        """Check whether to report a straggler: the last search found the same one,
        and it is not yet reported.
        """
        is_repeated, self._last = straggler.name == self._last, straggler.name
        if not is_repeated or straggler.name == self._reported:
            return False
        self._reported = straggler.name
        return bool(straggler.name)

    def search(self, pipeline: Sequence[RankSpans]) -> Straggler | None:
        """Gather all measurements and judge them on rank 0. Collective over all ranks; blocks.

        Args:
            pipeline: measurements of the last step, one for each rank of this pipeline.

        Returns:
            The straggler on rank 0; None on the others, if no step was measured since the last
            search, or on an error.
        """
        if not self._times:
            return None
        busy, reducing, steps = zip(*self._times, strict=True)
        self._times.clear()
        mesh, step_s = self._mesh, mean(steps)
        messages_s = _messages(mesh, pipeline, step_s / steps[-1]) if mesh.pp.rank == 0 else {}
        own_report = StragglerReport(
            mean(busy), reducing, mesh.replicas.ranks, mesh.pp.rank, messages_s
        )
        reports: list[StragglerReport] = mesh.world.gather_objects(own_report, StragglerReport)
        if mesh.rank != 0:
            return None
        try:
            tp, cp = (mesh.grid.tp, mesh.grid.cp) if mesh.device.type == "cuda" else (1, 1)
            return judge(reports, mesh.nodes, step_s, tp=tp, cp=cp)
        except Exception as error:
            tell(f"watch: the search for stragglers failed, the run continues: {error!r}")
            return None


def _messages(
    mesh: Mesh, pipeline: Sequence[RankSpans], scale: float
) -> dict[tuple[int, int], float]:
    """Return the waits for sent messages by global (sender, receiver), in seconds of a mean step.

    The clock error is subtracted from each wait. ``scale``: mean step time / time of the last step.
    Must not raise: all ranks enter the same gather afterwards.
    """
    try:
        spans, _, error_s = on_one_clock(pipeline)
        waits_s = on_their_way(Timeline("", spans), at_least=error_s)
    except Exception as error:
        tell(f"watch: the messages of a step cannot be accounted for, the run continues: {error!r}")
        return {}
    ranks = mesh.pp.ranks
    return {
        (ranks[sender], ranks[receiver]): scale * seconds
        for (sender, receiver), seconds in waits_s.items()
    }


def judge(
    reports: Sequence[StragglerReport],
    nodes: Sequence[str],
    step_s: float,
    *,
    tp: int = 1,
    cp: int = 1,
) -> Straggler:
    """Return the greatest delay, or ``NO_STRAGGLER`` if it is shorter than ``SHARE`` of the step.
    Pure.

    Args:
        reports: measurements of all ranks, by global rank.
        nodes: node name of each rank.
        step_s: seconds of a mean step.
        tp, cp: degrees of the axes along which a rank's time contains the waits for its neighbours,
            so that these cp x tp ranks cannot be distinguished.
    """
    candidates = [
        _rank(reports, nodes, step_s, tp, cp),
        _link(reports, nodes, step_s),
        _sums(reports, nodes, step_s),
    ]
    worst = max(filter(None, candidates), key=lambda each: each.delay_s, default=NO_STRAGGLER)
    return worst if worst.share >= SHARE else NO_STRAGGLER


def _rank(
    reports: Sequence[StragglerReport], nodes: Sequence[str], step_s: float, tp: int, cp: int
) -> Straggler | None:
    """Return the slowest rank, or its node if the whole node is slow;
    the delay is relative to the next slowest.
    """
    slowest = max(range(len(reports)), key=lambda rank: reports[rank].busy_s)
    together = cp * tp
    first = slowest - slowest % together
    others_s = [
        report.busy_s for rank, report in enumerate(reports) if not first <= rank < first + together
    ]
    elsewhere_s = [
        report.busy_s
        for report, node in zip(reports, nodes, strict=False)
        if node != nodes[slowest]
    ]
    if not others_s:
        return None
    busy_s, next_s = reports[slowest].busy_s, max(others_s)
    name = f"rank {slowest} on {nodes[slowest]}"
    if together > 1:
        kind = "-parallel and ".join(["tensor"] * (tp > 1) + ["context"] * (cp > 1))
        name = (
            f"one of the {kind}-parallel ranks {first}..{first + together - 1} on {nodes[slowest]}"
        )
    if elsewhere_s and busy_s - next_s < (busy_s - max(elsewhere_s)) / 2:
        name, next_s = f"the node {nodes[slowest]}", max(elsewhere_s)
    why = f"it is busy for {busy_s:.3g} s, the next slowest for {next_s:.3g} s"
    same_stages = [
        report.busy_s for report in reports if report.pp_rank == reports[slowest].pp_rank
    ]
    if len({report.pp_rank for report in reports}) > 1 and min(same_stages) > next_s:
        why += (
            "; all ranks with its stages are slow: check their balance (`meshwright stages`), then"
            " this rank"
        )
    return Straggler(name, slowest, busy_s - next_s, step_s, why)


def _link(
    reports: Sequence[StragglerReport], nodes: Sequence[str], step_s: float
) -> Straggler | None:
    waits_s = {
        ranks: seconds for report in reports for ranks, seconds in report.in_flight_s.items()
    }
    if not waits_s:
        return None
    sender, receiver = max(waits_s, key=waits_s.__getitem__)
    delay_s = waits_s[sender, receiver]
    if nodes[sender] == nodes[receiver]:
        name = f"the link from rank {sender} to rank {receiver} on {nodes[sender]}"
    else:
        pairs = _by_pair(waits_s, nodes)
        slow = [pair for pair, seconds in pairs if seconds >= SLOW_TOO * delay_s]
        common = set.intersection(*slow)
        name = f"the link between {' and '.join(sorted({nodes[sender], nodes[receiver]}))}"
        # one of them, or all: the measurements cannot distinguish
        if len(slow) > 1 and len(slow) == len(pairs):
            name = "the network between the nodes"
        elif len(slow) > 1 and len(common) == 1:
            name = f"the link of {common.pop()}"
    why = f"messages from rank {sender} to rank {receiver} had been sent, and were on their way"
    return Straggler(name, sender, delay_s, step_s, why)


def _by_pair(
    waits_s: dict[tuple[int, int], float], nodes: Sequence[str]
) -> list[tuple[set[str], float]]:
    """Return the longest wait between each pair of nodes, in seconds."""
    longest_s: dict[frozenset[str], float] = defaultdict(float)
    for (sender, receiver), seconds in waits_s.items():
        pair = frozenset({nodes[sender], nodes[receiver]})
        if len(pair) == 2:
            longest_s[pair] = max(longest_s[pair], seconds)
    return [(set(pair), seconds) for pair, seconds in longest_s.items()]


def _sums(
    reports: Sequence[StragglerReport], nodes: Sequence[str], step_s: float
) -> Straggler | None:
    """Return the slowest gradient sum.

    In each step the last rank to enter a sum waits for no other rank, so its wait is the duration
    of the sum.
    """
    groups: dict[tuple[int, ...], list[tuple[float, ...]]] = defaultdict(list)
    for report in reports:
        if len(report.replicas) > 1:
            groups[report.replicas].append(report.reducing_s)
    shortest = {ranks: mean(map(min, zip(*waits, strict=True))) for ranks, waits in groups.items()}
    if not shortest:
        return None
    ranks = max(shortest, key=shortest.__getitem__)
    hosts = abridge(list(dict.fromkeys(nodes[rank] for rank in ranks)))
    name = f"the sum of gradients over ranks {abridge(ranks)} on {hosts}"
    return Straggler(
        name, ranks[0], shortest[ranks], step_s, "even the last rank to enter it waits that long"
    )
