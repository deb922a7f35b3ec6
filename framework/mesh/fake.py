"""Fake mesh for dry runs: the mesh of one rank of a job of any size, in a single process without peers.

    job of 16,384      paper_mesh(grid, rank) ----->  the Mesh that this rank would have: its groups and coordinates
    this process       torch's "fake" backend         a collective returns at once and leaves its tensors as they are

The code of a rank (these groups, megatron-core's regions, torch's fully_shard) runs here unchanged, without peers.
Only the groups that contain the rank are created: creating all groups of 16,384 ranks would take minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import MeshError
from meshwright.mesh.activity import Activity
from meshwright.mesh.comm import Group, Traffic
from meshwright.mesh.grid import Axis, Coordinates, Grid
from meshwright.mesh.mesh import Mesh


class PaperGroup(Group):
    """Fake process group: only this rank exists. Every other rank is assumed to send the same values."""

    def gather_objects(self, value: Any, *kinds: type) -> list[Any]:
        """Return this rank's ``value`` once per rank. No communication."""
        return [value] * self.size

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Build the DeviceMesh outside FakeTensorMode: it stores the rank numbers in a real tensor."""
        with unset_fake_temporarily():
            return super().device_mesh(device_type)


class PaperMesh(Mesh):
    """Fake mesh that creates its subgroups on demand."""

    def _subgroup(self, name: str, ranks: tuple[int, ...]) -> Group:
        return _group(name, ranks, self.rank, self.traffic, self.activity)

    def stage_group(self, pp_ranks: Sequence[int]) -> Group:
        """Return the group of tied weights that contains this rank. Creates no other group."""
        pp_ranks = sorted(set(pp_ranks))
        if len(pp_ranks) > 1 and self.at.pp_rank not in pp_ranks:
            return Group("tied", (), -1, None, self.traffic, self.activity)
        at = self.at
        ranks = tuple(self.grid.rank(Coordinates(pp_rank, at.dp_rank, at.tp_rank)) for pp_rank in pp_ranks)
        return _group("tied", ranks if len(pp_ranks) > 1 else (self.rank,), self.rank, self.traffic, self.activity)


def _group(name: str, ranks: tuple[int, ...], rank: int, traffic: Traffic, activity: Activity) -> Group:
    made = dist.new_group(list(ranks), use_local_synchronization=True) if len(ranks) > 1 else None
    return PaperGroup(name, ranks, ranks.index(rank), made, traffic, activity)


@contextmanager
def paper_mesh(grid: Grid, rank: int, activity: Activity | None = None) -> Iterator[Mesh]:
    """Open the fake mesh of ``rank`` on CPU for the duration of the block, then destroy its process groups.

    Raises:
        MeshError: this process is a rank of a real job. Its process groups would be lost.
    """
    assert 0 <= rank < grid.size, (rank, grid.size)
    if dist.is_initialized():
        raise MeshError(
            "this process has joined a job already: a rank is rehearsed in a process of its own, before a job starts"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it, to prefix each traceback line with the rank
    traffic, activity = Traffic(), Activity() if activity is None else activity
    if grid.size > 1:
        dist.init_process_group("fake", rank=rank, world_size=grid.size, store=FakeStore())
    try:
        pp, dp, tp = (_group(axis, grid.group(axis, rank), rank, traffic, activity) for axis in Axis)
        everybody = dist.group.WORLD if grid.size > 1 else None
        world = PaperGroup("world", tuple(range(grid.size)), rank, everybody, traffic, activity)
        nodes = ["node0"] * grid.size
        yield PaperMesh(grid, rank, torch.device("cpu"), pp, dp, tp, world, traffic, nodes, activity=activity)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook
