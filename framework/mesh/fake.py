"""A mesh on paper: one rank's own mesh of a job of any size, in one process, with nobody at the other end.

    job of 16,384      fake_mesh(grid, rank) ----->  the Mesh that this rank would have: its groups and coordinates
    this process       torch's "fake" backend         a collective returns at once and leaves its tensors as they are

So that what runs on a rank (our groups, megatron-core's regions, torch's fully_shard) runs here as it is, without the
others. Only the groups that the rank is in are made: all of them, of 16,384 ranks, would take minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import MeshError
from meshwright.mesh.activity import Activity
from meshwright.mesh.comm import Group, Handle, Traffic, tensor_bytes
from meshwright.mesh.grid import Axis, Grid
from meshwright.mesh.mesh import Mesh


class FakeGroup(Group):
    """Group over torch's fake backend, with this rank alone. Values of other ranks are taken to equal this rank's."""

    def gather_objects(self, value: Any, *kinds: type) -> list[Any]:
        """Return this rank's value once per rank of the group."""
        return [value] * self.size

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the DeviceMesh, built from a real tensor of rank numbers even under FakeTensorMode."""
        with unset_fake_temporarily():
            return super().device_mesh(device_type)


class CountingGroup(Group):
    """Group without a process group, for tensors on the meta device: counts the traffic of collectives."""

    repeats = 1
    """Number of chunks that the present one is counted for."""

    def communicates(self, tensor: Tensor) -> bool:
        """Return True: collectives on the meta device are counted too."""
        return True

    def chunks(self, starts: Sequence[int]) -> Iterator[int]:
        """Yield the first chunk alone; meanwhile ``repeats`` is the number of chunks that it stands for."""
        if not starts:
            return
        self.repeats = len(starts)
        try:
            yield starts[0]
        finally:
            self.repeats = 1

    def all_reduce(self, tensor: Tensor, op: str = "sum", finish: Callable[[], object] | None = None) -> Handle:
        """Count an all-reduce; the tensor keeps its shape."""
        if self.size > 1:
            self._count("all_reduce", tensor_bytes(tensor))
        return Handle([], "", finish=finish)


class PlaceholderGroup(Group):
    """Group of a rank that is chosen later: layers are sharded for it before any mesh exists."""

    def become(self, other: Group) -> None:
        """Take over the ranks and the process group of ``other``, which has the same size and rank."""
        assert (self.size, self.rank) == (other.size, other.rank), (self, other)
        vars(self).update(vars(other))


class FakeMesh(Mesh):
    """Mesh whose groups are made on first use, those of this rank alone."""

    def stage_group(self, pp_ranks: Sequence[int]) -> Group:
        """Return the group of this rank, without making those of other ranks."""
        pp_ranks = sorted(set(pp_ranks))
        if len(pp_ranks) == 1:
            return self._group("tied", (self.rank,))
        if self.at.pp_rank not in pp_ranks:
            return self._group("tied", ())
        return self._subgroup("tied", tuple(self.grid.rank(self.at._replace(pp_rank=each)) for each in pp_ranks))

    def _group(self, name: str, ranks: tuple[int, ...], process_group: dist.ProcessGroup | None = None) -> Group:
        rank = ranks.index(self.rank) if ranks else -1
        return FakeGroup(name, ranks, rank, process_group, self.traffic, self.activity)


class _ObservedActivity(Activity):
    """Activity that calls ``on_begin`` at each start."""

    def __init__(self, on_begin: Callable[[object], None]) -> None:
        super().__init__()
        self._on_begin = on_begin

    def begin(self, what: object) -> None:
        super().begin(what)
        self._on_begin(what)


def _ignore(what: object) -> None:
    return None


@contextmanager
def fake_mesh(grid: Grid, rank: int, on_begin: Callable[[object], None] = _ignore) -> Iterator[Mesh]:
    """Open the mesh of ``rank`` on CPU inside the context, over torch's fake backend.

    ``on_begin``: called with each activity that the rank begins.

    Raises:
        MeshError: this process is a rank of a real job, whose process groups would be lost.
    """
    assert 0 <= rank < grid.size, (rank, grid.size)
    if dist.is_initialized():
        raise MeshError(
            "MW-MESH-004",
            "this process has joined a job already: a rank is rehearsed in a process of its own, before a job starts",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # replaced by torch, to put the rank before each line of a traceback
    traffic, activity = Traffic(), _ObservedActivity(on_begin)
    if grid.size > 1:
        dist.init_process_group("fake", rank=rank, world_size=grid.size, store=FakeStore())
    try:
        axes = {}
        for axis in Axis:
            ranks = grid.group(axis, rank)
            made = dist.new_group(list(ranks), use_local_synchronization=True) if len(ranks) > 1 else None
            axes[axis] = FakeGroup(axis, ranks, ranks.index(rank), made, traffic, activity)
        everybody = dist.group.WORLD if grid.size > 1 else None
        world = FakeGroup("world", tuple(range(grid.size)), rank, everybody, traffic, activity)
        pp, dp, tp = axes[Axis.PP], axes[Axis.DP], axes[Axis.TP]
        nodes = ["node0"] * grid.size
        yield FakeMesh(grid, rank, torch.device("cpu"), pp, dp, tp, world, traffic, nodes, activity=activity)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook
