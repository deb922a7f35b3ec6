"""Check that the ranks of a job agree: collectives, messages, and absence of deadlocks.

    collectives   all members of a group issue the same sequence: operation, bytes, dtype
    schedule      a rank with another schedule fits the others' rows (meshwright.schedule.analysis.check)
    messages      each send matches its receive: bytes and dtype, in the order of the channel
    deadlocks     meshwright_plan.dryrun.deadlock

Collectives are compared over all ranks. A column is the pipeline of ranks with the same (dp, tp).
Columns are alike unless a rank deviates, so messages are compared in the first column and in those
with deviating ranks. Ranks that disagree on the members of a group are found as a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from meshwright.schedule.analysis import check
from meshwright_plan.dryrun.deadlock import find_deadlock
from meshwright_plan.dryrun.groups import GroupViews, Ranks, axis_of, format_ranks
from meshwright_plan.dryrun.job import Job
from meshwright_plan.dryrun.rank_profile import CommunicationRecord


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
    found = [*_collectives(job, views), *_rows(job), *_messages(job, views)]
    deadlock = find_deadlock(job, views)
    return found if deadlock is None else [*found, Disagreement("hang", *deadlock)]


class _Position(NamedTuple):
    """Rank that represents a profile in a group."""

    rank: int
    """First rank of the group that has the profile."""
    group: Ranks
    """The group in terms of the profile's own rank, which may be another one."""


def _collectives(job: Job, views: GroupViews) -> Iterator[Disagreement]:
    """Compare collectives within groups whose members have different profiles."""
    by_group: dict[Ranks, dict[int, _Position]] = defaultdict(dict)
    # a separate dict: hashing a tuple of all ranks each time is slow
    world: dict[int, _Position] = {}
    for rank in range(job.grid.size):
        profile = job.profile_of(rank)
        for own in views.groups_of[id(profile)]:
            group = views.group(own, profile, rank)
            if len(group) == job.grid.size:
                world.setdefault(id(profile), _Position(rank, own))
            elif rank == group[0] or job.own_profiles or views.crosses_stages(own):
                by_group[group].setdefault(id(profile), _Position(rank, own))
    by_group[tuple(range(job.grid.size))] = world
    sequences: dict[tuple[int, Ranks], list[CommunicationRecord]] = {}

    def sequence(at: _Position) -> list[CommunicationRecord]:
        profile = job.profile_of(at.rank)
        if (id(profile), at.group) not in sequences:
            collectives = (each for each in profile.communication if each.call.peer is None)
            sequences[id(profile), at.group] = [
                each for each in collectives if each.call.group == at.group
            ]
        return sequences[id(profile), at.group]

    compared: set[tuple[tuple[int, Ranks], ...]] = set()
    for group, positions in by_group.items():
        key = tuple(sorted((profile, at.group) for profile, at in positions.items()))
        if len(positions) < 2 or key in compared:
            continue
        compared.add(key)
        first, *others = sorted(positions.values())
        expected = sequence(first)
        for other in others:
            actual = sequence(other)
            number = _first_difference(map(_signature, expected), map(_signature, actual))
            if number is not None:
                yield Disagreement(
                    "collectives",
                    (first.rank, other.rank),
                    f"number {number + 1} of the {axis_of(job.grid, group)} group"
                    f" {format_ranks(group)} is {_describe(expected, number)} on rank {first.rank}"
                    f" and {_describe(actual, number)} on rank {other.rank}",
                )


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
                f"rank {rank} runs {own.name} with {own.num_stages} stages placed in"
                f" {own.placement}, the others {schedule.name} with {schedule.num_stages} in"
                f" {schedule.placement}",
            )
            continue
        problems = check(replace(schedule, rows=tuple(rows)))
        if not problems:
            yield Disagreement(
                "schedule",
                (rank,),
                f"rank {rank} runs {own.name} and the others {schedule.name}: no rank blocks"
                " forever, but ranks compare their schedules at start, and exit there",
            )
        for problem in problems[:4]:
            column = job.grid.coordinates(rank)
            where = job.grid.rank(replace(column, pp_rank=problem.rank))
            yield Disagreement(
                "schedule",
                (where,),
                f"rank {rank} runs {own.name} and the others {schedule.name}: {problem.fault} on"
                f" rank {where} at {problem.action}: {problem.text}",
            )


def _messages(job: Job, views: GroupViews) -> Iterator[Disagreement]:
    """Compare sends with receives, on each channel of the first column and of the columns
    with deviating ranks.
    """
    ranks = (0, *job.own_profiles)
    columns = {replace(job.grid.coordinates(rank), pp_rank=0) for rank in ranks}
    for column in sorted(columns, key=job.grid.rank):
        sent: dict[tuple[int, int], list[CommunicationRecord]] = defaultdict(list)
        received: dict[tuple[int, int], list[CommunicationRecord]] = defaultdict(list)
        for pp_rank in range(job.grid.pp):
            rank = job.grid.rank(replace(column, pp_rank=pp_rank))
            for record in job.profile_of(rank).communication:
                if record.call.peer is None:
                    continue
                peer = views.peer(record, rank)
                if record.call.operation == "send":
                    sent[rank, peer].append(record)
                elif record.call.operation == "receive":
                    received[peer, rank].append(record)
        for channel in sorted(sent.keys() | received.keys()):
            sends, receives = sent[channel], received[channel]
            number = _first_difference(
                *([_signature(record)[1:] for record in end] for end in (sends, receives))
            )
            if number is not None:
                yield Disagreement(
                    "messages",
                    channel,
                    f"number {number + 1} from rank {channel[0]} to rank {channel[1]}: sent: "
                    f"{_describe(sends, number)}, expected: {_describe(receives, number)}",
                )


def _first_difference(ours: Iterable[object], theirs: Iterable[object]) -> int | None:
    """Return the index of the first unequal pair, None if all are equal;
    a missing element equals no other.
    """
    return next((index for index, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)


def _signature(record: CommunicationRecord) -> tuple[str, int, str]:
    return record.call.operation, record.call.num_bytes, record.call.dtype


def _describe(sequence: list[CommunicationRecord], number: int) -> str:
    if number >= len(sequence):
        return "nothing"
    operation, num_bytes, dtype = _signature(sequence[number])
    return (
        f"{operation.replace('_', '-')} of {num_bytes:,} bytes of {dtype} in"
        f" {sequence[number].activity}"
    )
