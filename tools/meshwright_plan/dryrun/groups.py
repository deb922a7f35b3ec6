"""Process groups of each rank of a job, derived from the profile that holds for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.mesh import Axis, Coordinates, Grid, expert_group
from meshwright_plan.dryrun.job import Job
from meshwright_plan.dryrun.rank_profile import CommunicationRecord, RankProfile

Ranks = tuple[int, ...]


def folded(grid: Grid) -> Grid:
    """Return the grid of the same ranks with cp folded into dp: its dp ranks are all replicas."""
    return Grid(pp=grid.pp, dp=grid.num_replicas, tp=grid.tp)


def axis_of(grid: Grid, group: Sequence[int], *, to_peer: bool = False, name: str = "") -> str:
    """Return the axis along which a group extends: pp, dp, tp, ``ep``,
    ``tied`` (copies of a weight) or ``world``.

    ``name``: name of its process group. Without it, an ep group with the same ranks as a tp or dp
        group has that axis.
    """
    if name == "ep":
        return name
    if to_peer:
        return Axis.PP
    if len(group) == grid.size and sum(degree > 1 for degree in folded(grid).degrees) > 1:
        return "world"
    at = [grid.coordinates(rank) for rank in group]
    varies = [axis for axis in grid.axes if len({each.along(axis) for each in at}) > 1]
    if set(varies) == {Axis.DP, Axis.CP}:
        return Axis.DP
    if len(varies) > 1 and grid.ep > 1 and tuple(group) == expert_group(grid, group[0]):
        return "ep"
    return "world" if len(varies) != 1 else "tied" if varies[0] is Axis.PP else varies[0]


class _Extent(NamedTuple):
    """Coordinates of a group's members, and its extent along dp and tp."""

    members: tuple[Coordinates, ...]
    first_dp: int
    num_dp: int
    dp_step: int
    """Distance between neighbouring dp ranks; 0: one replica."""
    along_tp: bool


def _extent(grid: Grid, group: Ranks) -> _Extent:
    members = tuple(grid.coordinates(rank) for rank in group)
    dps = sorted({member.dp_rank for member in members})
    step = dps[1] - dps[0] if len(dps) > 1 else 0
    return _Extent(members, dps[0], len(dps), step, len({member.tp_rank for member in members}) > 1)


class GroupViews:
    """Groups of each rank, computed from the profile that the rank follows."""

    def __init__(self, job: Job) -> None:
        self._axes, self._grid = job.grid, folded(job.grid)
        self._moved_groups: dict[tuple[Ranks, Coordinates], Ranks] = {}
        self._extents: dict[Ranks, _Extent] = {}
        profiles = [*job.profiles, *job.own_profiles.values()]
        self.groups_of = {
            id(profile): {
                record.call.group for record in profile.communication if record.call.peer is None
            }
            for profile in profiles
        }

    def group(self, group: Ranks, profile: RankProfile, rank: int) -> Ranks:
        """Translate ``group`` of a profile into the group of ``rank``, which follows that profile.

        The group is moved along dp and tp so that it contains ``rank``; its pipeline ranks stay.
        """
        if profile.rank == rank or len(group) == self._grid.size:
            return group
        if group not in self._extents:
            self._extents[group] = _extent(self._grid, group)
        extent, at = self._extents[group], self._grid.coordinates(rank)
        first_dp = at.dp_rank
        if extent.dp_step:  # back to the first member
            first_dp -= at.dp_rank // extent.dp_step % extent.num_dp * extent.dp_step
        key = (group, replace(at, dp_rank=first_dp, tp_rank=0 if extent.along_tp else at.tp_rank))
        if key not in self._moved_groups:
            self._moved_groups[key] = tuple(
                self._grid.rank(
                    Coordinates(
                        pp_rank=member.pp_rank,
                        dp_rank=member.dp_rank - extent.first_dp + first_dp,
                        tp_rank=member.tp_rank if extent.along_tp else at.tp_rank,
                    )
                )
                for member in extent.members
            )
        return self._moved_groups[key]

    def crosses_stages(self, group: Ranks) -> bool:
        """Return True if the group spans several pipeline ranks,
        which follow different profiles.
        """
        return (
            len({member // (self._grid.dp * self._grid.tp) for member in (group[0], group[-1])}) > 1
        )

    def peer(self, record: CommunicationRecord, rank: int) -> int:
        """Return the rank at the other end of a message."""
        assert record.call.peer is not None
        at = self._grid.coordinates(rank)
        return self._grid.rank(
            replace(at, pp_rank=self._grid.coordinates(record.call.peer).pp_rank)
        )


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ``[0 1 2]``, long lists shortened; one rank alone as its number."""
    shown = [str(rank) for rank in ranks[:6]] + (["..", str(ranks[-1])] if len(ranks) > 6 else [])
    return " ".join(shown) if len(ranks) == 1 else f"[{' '.join(shown)}]"
