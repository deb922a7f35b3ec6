"""Check that the ranks of a job agree: group members, collectives, messages, and absence of deadlocks.

    members       every rank of a group counts every other one as a member
    collectives   all members of a group issue the same sequence: operation, bytes, dtype
    messages      each send matches its receive: bytes and dtype, in the order of the channel; and the rows themselves
                  pass meshwright.schedule.analysis.check
    hang          played to the end; each operation blocks until all its ranks have reached it (the strictest
                  semantics)

The rehearsal that a rank follows is called its script. Members and collectives are compared over all ranks. A column is
the ranks with the same (dp, tp). Columns behave alike unless a rank differs, so only columns with such ranks are
played, and one more along each axis.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from meshwright.mesh.grid import Axis, Coordinates, Grid
from meshwright.schedule.analysis import check
from meshwright.tools.dryrun.account import CommunicationRecord, Rehearsal
from meshwright.tools.dryrun.job import Job

Ranks = tuple[int, ...]


class Disagreement(NamedTuple):
    """Disagreement between ranks: its kind, the ranks and a description."""

    kind: str
    ranks: Ranks
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def disagreements(job: Job) -> list[Disagreement]:
    """Return all disagreements, causes before consequences; empty if the job can run."""
    views = GroupViews(job)
    found = [*_members(job, views), *_collectives(job, views), *_rows(job), *_messages(job, views)]
    return found + list(_hangs(job, views))


def axis_of(grid: Grid, group: Sequence[int], *, to_peer: bool = False) -> str:
    """Return the axis along which a group extends: pp, dp, tp, ``tied`` (copies of a weight) or ``world``."""
    if to_peer:
        return Axis.PP
    if len(group) == grid.size and sum(degree > 1 for degree in grid) > 1:
        return "world"
    at = [grid.coordinates(rank) for rank in group]
    varies = [axis for axis in Axis if len({getattr(each, f"{axis}_rank") for each in at}) > 1]
    return "world" if len(varies) != 1 else "tied" if varies[0] is Axis.PP else varies[0]


class _Outline(NamedTuple):
    """Members of a group, and its extent along dp and tp."""

    members: tuple[Coordinates, ...]
    first_dp: int
    num_dp: int
    dp_step: int
    """Distance between neighbouring dp ranks; 0: one replica."""
    along_tp: bool


def _outline(grid: Grid, group: Ranks) -> _Outline:
    members = tuple(grid.coordinates(rank) for rank in group)
    dps = sorted({member.dp_rank for member in members})
    step = dps[1] - dps[0] if len(dps) > 1 else 0
    return _Outline(members, dps[0], len(dps), step, len({member.tp_rank for member in members}) > 1)


class GroupViews:
    """Each rank's view of its groups."""

    def __init__(self, job: Job) -> None:
        self._grid, self._job = job.grid, job
        self._kept: dict[tuple[Ranks, Coordinates], Ranks] = {}
        self._outlines: dict[Ranks, _Outline] = {}
        self._strangers: dict[tuple[str, int], set[int]] = defaultdict(set)
        """(axis, rank) -> members of its group that are missing in its view."""
        for axis, rank in job.missing:
            for other in job.grid.group(Axis(axis), rank):
                if other != rank:
                    self._strangers[axis, other].add(rank)
        scripts = [*job.rehearsals, *job.own.values()]
        self.kinds = {
            id(script): {spoken.heard.group for spoken in script.said if spoken.heard.peer is None}
            for script in scripts
        }
        self._exchanging = {
            id(script) for script in scripts if any(spoken.heard.peer is not None for spoken in script.said)
        }

    def group(self, group: Ranks, script: Rehearsal, rank: int) -> Ranks:
        """Return the group of ``rank``, in its own view, that corresponds to ``group`` in the script it follows."""
        moved = group if script.rank == rank else self._moved(group, rank)
        return self._known(axis_of(self._grid, group), moved, rank) if self._strangers else moved

    def _known(self, axis: str, group: Ranks, rank: int) -> Ranks:
        unknown = self._strangers.get((axis, rank))
        return tuple(member for member in group if member not in unknown) if unknown else group

    def beliefs(self, script: Rehearsal, rank: int) -> Iterator[tuple[str, Ranks, Ranks]]:
        """Yield (axis, group by the grid, group in the view of ``rank``) for each group in which it communicates."""
        for kind in self.kinds[id(script)]:
            axis = axis_of(self._grid, kind) if self._strangers or len(kind) < self._grid.size else "world"
            if axis != "world":
                moved = kind if script.rank == rank else self._moved(kind, rank)
                yield axis, moved, self._known(axis, moved, rank)
        if self._strangers and id(script) in self._exchanging:
            column = self._grid.group(Axis.PP, rank)
            yield Axis.PP, column, self._known(Axis.PP, column, rank)

    def knows(self, rank: int, peer: int) -> bool:
        """Return True if ``peer`` exists in the view of ``rank``, so that they can exchange messages."""
        return peer not in self._strangers.get((Axis.PP, rank), ())

    def _moved(self, group: Ranks, rank: int) -> Ranks:
        if len(group) == self._grid.size:
            return group
        if group not in self._outlines:
            self._outlines[group] = _outline(self._grid, group)
        outline, at = self._outlines[group], self._grid.coordinates(rank)
        dp_shift = 0
        if outline.dp_step:  # one contiguous run of dp ranks, or the same position in each run
            is_run = outline.dp_step == 1
            dp_shift = at.dp_rank - at.dp_rank % outline.num_dp if is_run else at.dp_rank % outline.dp_step
        key = (
            group,
            at._replace(
                dp_rank=dp_shift if outline.dp_step else at.dp_rank, tp_rank=0 if outline.along_tp else at.tp_rank
            ),
        )
        if key not in self._kept:
            self._kept[key] = tuple(
                self._grid.rank(
                    Coordinates(
                        member.pp_rank,
                        member.dp_rank - outline.first_dp + dp_shift if outline.dp_step else at.dp_rank,
                        member.tp_rank if outline.along_tp else at.tp_rank,
                    )
                )
                for member in outline.members
            )
        return self._kept[key]

    def crosses_stages(self, kind: Ranks) -> bool:
        """Return True if the group spans several pipeline ranks, which follow different scripts."""
        return len({member // (self._grid.dp * self._grid.tp) for member in (kind[0], kind[-1])}) > 1

    def peer(self, spoken: CommunicationRecord, script: Rehearsal, rank: int) -> int:
        """Return the rank at the other end of a message."""
        assert spoken.heard.peer is not None
        at = self._grid.coordinates(rank)
        return self._grid.rank(at._replace(pp_rank=self._grid.coordinates(spoken.heard.peer).pp_rank))


def _members(job: Job, views: GroupViews) -> Iterator[Disagreement]:
    believers: dict[tuple[str, Ranks], set[int]] = defaultdict(set)
    believed: dict[tuple[str, Ranks], set[Ranks]] = defaultdict(set)
    for rank in range(job.grid.size):
        for axis, whole, group in views.beliefs(job.rehearsal_of(rank), rank):
            believers[axis, group].add(rank)
            believed[axis, whole].add(group)
    told: set[tuple[str, int, int]] = set()
    named: set[tuple[str, int]] = set()
    for (axis, group), ranks in believers.items():
        strangers = set(group) - ranks
        if not strangers or not (ranks & set(group)):
            continue
        for stranger in sorted(strangers):
            first = min(ranks)
            if (axis, stranger, len(group)) in told:
                continue
            told.add((axis, stranger, len(group)))
            others = [g for (a, g), own in believers.items() if a == axis and stranger in own and set(g) < set(group)]
            other = max(others, key=lambda g: len(set(g) & set(group)), default=())
            left_out = sorted(set(group) - set(other) - {stranger}) or sorted(set(other) - set(group))
            named |= {(axis, member) for member in group}
            yield Disagreement(
                "members",
                tuple(sorted({first, stranger, *left_out})),
                f"rank {first} counts itself into the {axis} group {_few(group)}, and rank "
                f"{stranger} knows that group as {_few(other) if len(other) > 1 else 'itself alone'}, without rank "
                f"{_few(left_out)}",
            )
    for (axis, whole), parts in believed.items():
        if whole not in parts and not any((axis, member) in named for member in whole):
            yield Disagreement(
                "members",
                whole,
                f"the {axis} group {_few(whole)} has fallen into {' and '.join(_few(part) for part in sorted(parts))}, "
                f"which do not know each other: each part goes on by itself, with other numbers",
            )


def _collectives(job: Job, views: GroupViews) -> Iterator[Disagreement]:
    """Compare collectives within groups whose members follow different scripts."""
    by_group: dict[Ranks, dict[int, _ScriptPosition]] = defaultdict(dict)
    world: dict[int, _ScriptPosition] = {}  # kept apart: looking up a group of all ranks is slow
    for rank in range(job.grid.size):
        script = job.rehearsal_of(rank)
        for kind in views.kinds[id(script)]:
            group = views.group(kind, script, rank)
            if len(group) == job.grid.size:
                world.setdefault(id(script), _ScriptPosition(rank, kind))
            elif rank == group[0] or job.own or views.crosses_stages(kind):
                by_group[group].setdefault(id(script), _ScriptPosition(rank, kind))
    by_group[tuple(range(job.grid.size))] = world
    sequences: dict[tuple[int, Ranks], list[CommunicationRecord]] = {}
    told: set[tuple[tuple[int, Ranks], ...]] = set()
    for group, places in by_group.items():
        if len(places) < 2:
            continue
        if (key := tuple(sorted((script, place.kind) for script, place in places.items()))) in told:
            continue
        told.add(key)
        for place in places.values():
            script = job.rehearsal_of(place.rank)
            if (id(script), place.kind) not in sequences:
                sequences[id(script), place.kind] = [
                    each for each in script.said if each.heard.peer is None and each.heard.group == place.kind
                ]
        first, *others = sorted(places.values())
        mine = sequences[id(job.rehearsal_of(first.rank)), first.kind]
        for other in others:
            theirs = sequences[id(job.rehearsal_of(other.rank)), other.kind]
            number = next(
                (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if _words(a) != _words(b)),
                min(len(mine), len(theirs)) if len(mine) != len(theirs) else None,
            )
            if number is not None:
                yield Disagreement(
                    "collectives",
                    (first.rank, other.rank),
                    f"number {number + 1} of the {axis_of(job.grid, group)} group {_few(group)} is "
                    f"{_said(mine, number)} on rank {first.rank} and {_said(theirs, number)} on rank {other.rank}",
                )


class _ScriptPosition(NamedTuple):
    """Position of a script in a group."""

    rank: int
    """First rank of the group that follows the script."""
    kind: Ranks
    """The group as the script contains it."""


def _rows(job: Job) -> Iterator[Disagreement]:
    """Check ranks that run another schedule than the rest of their column."""
    schedule = job.blueprint.schedule
    for rank, own in job.own_schedules.items():
        pp_rank = job.grid.coordinates(rank).pp_rank
        rows = list(schedule.rows)
        rows[pp_rank] = own.rows[pp_rank]
        if (own.num_stages, own.placement) != (schedule.num_stages, schedule.placement):
            yield Disagreement(
                "schedule",
                (rank,),
                f"rank {rank} runs {own.name} with {own.num_stages} stages placed in {own.placement}, the others "
                f"{schedule.name} with {schedule.num_stages} in {schedule.placement}",
            )
            continue
        problems = check(replace(schedule, rows=tuple(rows)))
        if not problems:
            yield Disagreement(
                "schedule",
                (rank,),
                f"rank {rank} runs {own.name} and the others {schedule.name}: nobody waits for ever, but ranks compare "
                f"their schedules when they start, and end there",
            )
        for problem in problems[:4]:
            column = job.grid.coordinates(rank)
            where = job.grid.rank(column._replace(pp_rank=problem.rank))
            yield Disagreement(
                "schedule",
                (where,),
                f"rank {rank} runs {own.name} and the others {schedule.name}: {problem.fault} on rank {where} at "
                f"{problem.action}: {problem.text}",
            )


def _messages(job: Job, views: GroupViews) -> Iterator[Disagreement]:
    """Compare sends with receives, on each channel of the first column and of the columns with deviating ranks."""
    apart = [*job.own, *(rank for axis, rank in job.missing if axis == Axis.PP)]
    columns = {(0, 0)} | {tuple(job.grid.coordinates(rank)[1:]) for rank in apart}
    for dp_rank, tp_rank in sorted(columns):
        sent: dict[tuple[int, int], list[CommunicationRecord]] = defaultdict(list)
        received: dict[tuple[int, int], list[CommunicationRecord]] = defaultdict(list)
        for pp_rank in range(job.grid.pp):
            rank = job.grid.rank(Coordinates(pp_rank, dp_rank, tp_rank))
            script = job.rehearsal_of(rank)
            for spoken in script.said:
                if spoken.heard.peer is None or not views.knows(rank, peer := views.peer(spoken, script, rank)):
                    continue
                if spoken.heard.operation == "send":
                    sent[rank, peer].append(spoken)
                elif spoken.heard.operation == "receive":
                    received[peer, rank].append(spoken)
        for channel in sorted(sent.keys() | received.keys()):
            sends, receives = sent[channel], received[channel]
            for number in range(max(len(sends), len(receives))):
                pair = [_message(each, number) for each in (sends, receives)]
                if pair[0] != pair[1]:
                    source, destination = channel
                    yield Disagreement(
                        "messages",
                        channel,
                        f"number {number + 1} from rank {source} to rank {destination}: sent is "
                        f"{_said(sends, number)}, awaited is {_said(receives, number)}",
                    )
                    break


def _message(messages: list[CommunicationRecord], number: int) -> tuple[int, str] | None:
    if number >= len(messages):
        return None
    heard = messages[number].heard
    return heard.num_bytes, heard.dtype


def _words(spoken: CommunicationRecord) -> tuple[str, int, str]:
    return spoken.heard.operation, spoken.heard.num_bytes, spoken.heard.dtype


def _said(sequence: list[CommunicationRecord], number: int) -> str:
    if number >= len(sequence):
        return "nothing"
    spoken = sequence[number]
    operation, num_bytes, dtype = _words(spoken)
    return f"{operation.replace('_', '-')} of {num_bytes:,} bytes of {dtype} in {spoken.what}"


def _few(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:6]] + (["..", str(ranks[-1])] if len(ranks) > 6 else [])
    return " ".join(shown) if len(ranks) == 1 else f"[{' '.join(shown)}]"


# ------------------------------------------------------------------------------------------------------------ deadlocks


class _Item(NamedTuple):
    """Blocking unit of a rank: messages posted together, or one collective."""

    what: object
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    group: Ranks


def _items(job: Job, views: GroupViews, rank: int) -> list[_Item]:
    script = job.rehearsal_of(rank)
    found = []
    for is_message, run in groupby(script.said, key=lambda s: id(s.what) if s.heard.peer is not None else None):
        together = list(run)
        if is_message is None:
            found += [_Item(s.what, (), (), views.group(s.heard.group, script, rank)) for s in together]
            continue
        peers = [(s.heard.operation, peer) for s in together if views.knows(rank, peer := views.peer(s, script, rank))]
        sends = tuple(peer for operation, peer in peers if operation == "send")
        found.append(_Item(together[0].what, sends, tuple(p for o, p in peers if o == "receive"), ()))
    return found


def _hangs(job: Job, views: GroupViews) -> Iterator[Disagreement]:
    apart = [job.grid.coordinates(rank) for rank in [*job.own, *(rank for _, rank in job.missing)]]
    dps = {at.dp_rank for at in apart} or {0}
    tps = {at.tp_rank for at in apart} or {0}
    if apart:
        dps |= {next(iter(set(range(min(job.grid.dp, len(dps) + 1))) - dps), 0)}
        tps |= {next(iter(set(range(min(job.grid.tp, len(tps) + 1))) - tps), 0)}
    ranks = [job.grid.rank(Coordinates(p, d, t)) for p in range(job.grid.pp) for d in sorted(dps) for t in sorted(tps)]
    players = set(ranks)
    rows = {rank: _items(job, views, rank) for rank in ranks}
    at = dict.fromkeys(ranks, 0)
    posted: dict[tuple[int, int, bool], int] = defaultdict(int)
    awaited: dict[int, list[tuple[tuple[int, int, bool], int]]] = {}
    arrived: dict[Ranks, dict[int, int]] = defaultdict(dict)
    to_visit = deque(ranks)
    while to_visit:
        rank = to_visit.popleft()
        while at[rank] < len(rows[rank]):
            item = rows[rank][at[rank]]
            if item.group:
                members = players & set(item.group) if len(item.group) < job.grid.size else players
                number = arrived[item.group].get(rank, 0)
                if rank not in awaited:
                    awaited[rank] = []
                    arrived[item.group][rank] = number = number + 1
                    to_visit.extend(members - {rank})
                if any(arrived[item.group].get(member, 0) < number for member in members):
                    break
            else:
                if rank not in awaited:
                    awaited[rank] = []
                    for peer, sends in [*((p, True) for p in item.sends), *((p, False) for p in item.receives)]:
                        mine = (rank, peer, True) if sends else (peer, rank, False)
                        posted[mine] += 1
                        awaited[rank].append(((mine[0], mine[1], not sends), posted[mine]))
                        to_visit.append(peer)
                if any(posted[end] < number for end, number in awaited[rank]):
                    break
            del awaited[rank]
            at[rank] += 1
    stuck = [rank for rank in ranks if at[rank] < len(rows[rank])]
    if not stuck:
        return
    lines = []
    for rank in stuck[:6]:
        item = rows[rank][at[rank]]
        whom = sorted({*item.sends, *item.receives}) or [member for member in item.group if member != rank]
        lines.append(f"rank {rank} in {item.what} for {_few(whom)}")
    more = f", and {len(stuck) - 6} more" if len(stuck) > 6 else ""
    yield Disagreement("hang", tuple(stuck), f"these wait for ever: {'; '.join(lines)}{more}")
