"""Mesh of a running job: process groups (by torch's DeviceMesh), coordinates and device of a rank. Never a global."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.errors import ConfigError, MeshError
from meshwright.mesh.activity import Activity
from meshwright.mesh.comm import Group, Traffic
from meshwright.mesh.grid import Axis, Coordinates, Grid, check_placement
from meshwright.mesh.network import node_name
from meshwright.mesh.rendezvous import needs_rendezvous, open_rendezvous
from meshwright.mesh.store import NoteStore


@dataclass(frozen=True)
class Mesh:
    """Process groups and coordinates of this rank. Built by :func:`open_mesh`, ended by :func:`close_mesh`."""

    grid: Grid
    rank: int
    device: torch.device
    pp: Group
    dp: Group
    tp: Group
    world: Group
    traffic: Traffic
    nodes: list[str] = field(default_factory=list)
    """Name of the node of each rank."""
    timeout_s: float = 600.0
    """Timeout of a collective in seconds."""
    activity: Activity = field(default_factory=Activity)
    """Present activity of this rank."""

    @property
    def at(self) -> Coordinates:
        """Coordinates of this rank."""
        return self.grid.coordinates(self.rank)

    def board(self) -> NoteStore | None:
        """Store for small notes between ranks, over a connection of its own. A mesh of one rank has none."""
        return NoteStore(dist.distributed_c10d._get_default_store()) if self.grid.size > 1 else None

    def split_dp(self, shard_factor: int) -> tuple[Group, Group]:
        """Return (the replicas among whom a state is cut into ``shard_factor`` shards, those with copies of this rank's
        shard).

        Replicas d .. d + shard_factor - 1 shard together: dp is laid out so that they share a node before they span
        two. With all of dp or with 1 it is (dp, this rank alone) or (this rank alone, dp). Collective over all ranks.
        """
        alone = Group("dp", (self.rank,), 0, None, self.traffic, self.activity)
        if shard_factor == self.dp.size:
            return self.dp, alone
        if shard_factor == 1:
            return alone, self.dp
        assert self.dp.size % shard_factor == 0, (self.dp.size, shard_factor)
        first = self.dp.rank - self.dp.rank % shard_factor
        shard = self.dp.ranks[first : first + shard_factor]
        copies = self.dp.ranks[self.dp.rank % shard_factor :: shard_factor]
        return self._subgroup("dp_shard", shard), self._subgroup("dp_replicate", copies)

    def _subgroup(self, name: str, ranks: tuple[int, ...]) -> Group:
        """Make a subgroup. Called by its own ranks alone; all ranks make theirs in the same order."""
        timeout = timedelta(seconds=self.timeout_s)
        made = dist.new_group(list(ranks), timeout, use_local_synchronization=True)
        group = Group(name, ranks, ranks.index(self.rank), made, self.traffic, self.activity)
        if self.device.type == "cuda":
            group.barrier()
        return group

    def stage_group(self, pp_ranks: Sequence[int]) -> Group:
        """Return the group of the ranks at these pipeline ranks with this rank's dp and tp coordinates (for tied
        weights).

        Every rank of the mesh must call this, in the same order and with the same ``pp_ranks``: process groups are
        made by all ranks together. A rank that is no member gets a group with ``rank`` -1, which it must not use.
        """
        pp_ranks = sorted(set(pp_ranks))
        if len(pp_ranks) == 1:
            return Group("tied", (self.rank,), 0, None, self.traffic, self.activity)
        mine = Group("tied", (), -1, None, self.traffic, self.activity)
        for dp_rank in range(self.grid.dp):
            for tp_rank in range(self.grid.tp):
                ranks = tuple(self.grid.rank(Coordinates(pp_rank, dp_rank, tp_rank)) for pp_rank in pp_ranks)
                made = dist.new_group(list(ranks), timedelta(seconds=self.timeout_s))
                if self.rank in ranks:
                    mine = Group("tied", ranks, ranks.index(self.rank), made, self.traffic, self.activity)
        return mine


def environment_rank() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) from torchrun's environment variables; a lone process is rank 0 of 1."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = {name: os.environ.get(name, "") for name in names}
    if not any(found.values()):
        return 0, 1, 0
    try:
        rank, world_size = int(found["RANK"]), int(found["WORLD_SIZE"])
        return rank, world_size, int(found["LOCAL_RANK"] or 0)
    except ValueError:
        raise MeshError(
            "MW-MESH-008",
            f"the environment has {found}: RANK and WORLD_SIZE must both be numbers. Start with `meshwright train`, "
            f"torchrun or srun, or unset all of them",
        ) from None


def check_size(grid: Grid, world_size: int) -> None:
    """Check that there are as many ranks as the grid has.

    Raises:
        MeshError: there are others.
    """
    if world_size != grid.size:
        raise MeshError(
            "MW-MESH-009",
            f"parallel.pp {grid.pp} x dp {grid.dp} x tp {grid.tp} = {grid.size} ranks, but {world_size} were started: "
            f"change a degree, or start {grid.size} processes",
        )


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device: with ``auto`` this process's GPU if there is one, else the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "MW-MESH-010",
            "train.device = 'cuda', but torch sees no GPU here: use 'auto' or 'cpu', or a CUDA build of torch",
        )
    count = torch.cuda.device_count()
    if count == 1 and "SLURM_PROCID" in os.environ:  # srun --gpus-per-task=1 shows each task its own, as number 0
        local_rank = 0
    if local_rank >= count:
        raise MeshError(
            "MW-MESH-011",
            f"local rank {local_rank} has no GPU of its own: {count} visible. Start at most {count} processes on this "
            f"node (launch.processes), or set CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def open_mesh(
    grid: Grid,
    device: str = "auto",
    *,
    timeout_s: float = 600.0,
    tp_across_nodes: bool = False,
    store: Any = None,
) -> Mesh:
    """Join the process group that the environment describes and make the groups of the axes.

    An already initialised process group of the right size is used as it is. A grid of one rank needs none at all.
    ``store``: from :func:`meshwright.mesh.rendezvous.open_rendezvous`, where the ranks have met before.

    Raises:
        MeshError: the world's size is not the grid's, ranks do not come, or a tp group straddles nodes.
    """
    rank, world_size, local_rank = environment_rank()
    check_size(grid, world_size)
    chosen = pick_device(device, local_rank)
    traffic, activity = Traffic(), Activity()
    if grid.size == 1:
        alone = {axis: Group(axis, (0,), 0, None, traffic, activity) for axis in Axis}
        return Mesh(
            grid,
            0,
            chosen,
            alone[Axis.PP],
            alone[Axis.DP],
            alone[Axis.TP],
            Group("world", (0,), 0, None, traffic, activity),
            traffic,
            [node_name()],
            timeout_s,
            activity,
        )
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        if store is None and needs_rendezvous():
            store = open_rendezvous(rank, world_size, timeout_s)
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            timeout=timeout,
            store=store,
            rank=-1 if store is None else rank,
            world_size=-1 if store is None else world_size,
            device_id=chosen if chosen.type == "cuda" else None,
        )
    torch_mesh = init_device_mesh(chosen.type, (grid.pp, grid.dp, grid.tp), mesh_dim_names=tuple(Axis))
    groups: dict[Axis, Group] = {}
    for axis in Axis:
        ranks = grid.group(axis, rank)
        process_group = torch_mesh.get_group(str(axis)) if len(ranks) > 1 else None
        if process_group is not None:  # a DeviceMesh gives its groups torch's own limit: 10 minutes, with gloo 30
            dist.distributed_c10d._set_pg_timeout(timeout, process_group)
        groups[axis] = Group(axis, ranks, ranks.index(rank), process_group, traffic, activity)
    world = Group("world", tuple(range(grid.size)), rank, dist.group.WORLD, traffic, activity)
    if chosen.type == "cuda":  # NCCL wants every rank of a group in its first call, which an exchange is not
        for group in groups.values():
            group.barrier()
    nodes = world.gather_objects(node_name())
    check_placement(grid, nodes, tp_across_nodes=tp_across_nodes)
    axes = groups[Axis.PP], groups[Axis.DP], groups[Axis.TP]
    return Mesh(grid, rank, chosen, *axes, world, traffic, nodes, timeout_s, activity)


def close_mesh(mesh: Mesh) -> None:
    """Close the mesh: barrier over all ranks, then destroy the process groups. Blocks."""
    if mesh.grid.size > 1 and dist.is_initialized():
        mesh.world.barrier()
        dist.destroy_process_group()
