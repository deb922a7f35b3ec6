"""Mesh of a running job: process groups (made by torch's DeviceMesh),
coordinates and device of a rank. No globals.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshwright.errors import MeshError
from meshwright.mesh.activity import Activity
from meshwright.mesh.comm import Group
from meshwright.mesh.device import peak_memory_bytes, pick_device
from meshwright.mesh.expert_groups import expert_group, expert_replicas
from meshwright.mesh.grid import Axis, Coordinates, Grid
from meshwright.mesh.links import LinkedGroup, open_links
from meshwright.mesh.placement import check_placement
from meshwright.mesh.rendezvous import needs_rendezvous, open_rendezvous
from meshwright.mesh.store import NoteStore
from meshwright.mesh.traffic import Traffic
from meshwright.system.host import node_name
from meshwright.system.numbers import MAX_RANKS, environment_number

PRIVATE_TORCH = {
    "torch.distributed.distributed_c10d._abort_process_group": "2.11-2.15",
    "torch.distributed.distributed_c10d._get_default_store": "2.11-2.15",
    "torch.distributed.distributed_c10d._set_pg_timeout": "2.11-2.15",
    "torch.distributed.distributed_c10d._world.pg_map": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


@dataclass(frozen=True)
class Mesh:
    """Process groups and coordinates of this rank. Built by :func:`open_mesh`,
    ended by :func:`close_mesh`.
    """

    grid: Grid
    rank: int
    device: torch.device
    pp: Group
    replicas: Group
    """The dp x cp ranks with the same weights."""
    tp: Group
    world: Group
    traffic: Traffic
    nodes: list[str] = field(default_factory=list)
    """Name of the node of each rank."""
    timeout_s: float = 600.0
    """Timeout of a collective in seconds."""
    activity: Activity = field(default_factory=Activity)
    """Present activity of this rank."""
    cp: Group = field(default_factory=lambda: Group("cp", (0,), 0))
    """Ranks that hold the other tokens of this rank's samples."""
    ep: Group = field(default_factory=lambda: Group("ep", (0,), 0))
    """Ranks over which a layer's experts are distributed."""
    expert_replicas: Group = field(default_factory=lambda: Group("experts", (0,), 0))
    """Ranks with the same experts; this rank alone with ep = 1,
    where experts are like other weights.
    """

    @cached_property
    def at(self) -> Coordinates:
        """Coordinates of this rank."""
        return self.grid.coordinates(self.rank)

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this rank's device, or on CPU of this process."""
        return peak_memory_bytes(self.device.type)

    @cached_property
    def host(self) -> Group:
        """Group of all ranks for tensors in host memory, over gloo. A thread may use it beside the
        steps: its messages, activity and traffic are apart from those of the other groups.

        The first use is collective over all ranks, and blocks.
        """
        process_group = None
        if self.grid.size > 1:
            timeout = timedelta(seconds=self.timeout_s)
            process_group = dist.new_group(backend="gloo", timeout=timeout)
        return Group("host", self.world.ranks, self.rank, process_group)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device; on CUDA from pinned memory,
        so that the host does not wait for the GPU.
        """
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def open_store(self) -> NoteStore | None:
        """Open a store for small notes between ranks, over a connection of its own.
        None for a mesh of one rank.
        """
        return NoteStore(dist.distributed_c10d._get_default_store()) if self.grid.size > 1 else None

    def holds_store(self) -> bool:
        """Return True on the rank whose process hosts the store of :meth:`open_store`:
        the store ends with it.
        """
        return self.grid.size > 1 and self.rank == 0 and needs_rendezvous()

    def split(self, replicas: Group, shard_factor: int) -> tuple[Group, Group]:
        """Return (group of the replicas that shard a state in ``shard_factor`` parts, group of the
        replicas that hold this rank's shard).

        Neighbouring replicas d .. d + shard_factor - 1 shard together, because neighbours share a
        node first. With all replicas or with 1 it is (replicas, this rank alone) or (this rank
        alone, replicas). Collective over all ranks. Blocks on CUDA.
        """
        name, alone = replicas.name, self._group(replicas.name, (self.rank,))
        if shard_factor == replicas.size:
            return replicas, alone
        if shard_factor == 1:
            return alone, replicas
        assert replicas.size % shard_factor == 0, (replicas.size, shard_factor)
        first = replicas.rank - replicas.rank % shard_factor
        shard = replicas.ranks[first : first + shard_factor]
        copies = replicas.ranks[replicas.rank % shard_factor :: shard_factor]
        return self._subgroup(f"{name}_shard", shard), self._subgroup(f"{name}_replicate", copies)

    def second_group(self, group: Group, name: str) -> Group:
        """Return a group of the same ranks with a communicator of its own, whose messages do not
        queue behind those of the first. Collective over all ranks. Blocks on CUDA.
        """
        alone = self._group(name, group.ranks)
        return self._subgroup(name, group.ranks) if group.size > 1 else alone

    def over_tp(self, shard: Group) -> Group:
        """Return the group of all ranks in the tp groups of ``shard``, tp innermost.
        Collective over all ranks.
        """
        if 1 in (self.tp.size, shard.size):
            return shard if self.tp.size == 1 else self.tp
        ranks = sorted(
            rank for shard_rank in shard.ranks for rank in self.grid.group(Axis.TP, shard_rank)
        )
        return self._subgroup("dp_tp", tuple(ranks))

    def stage_group(self, pp_ranks: Sequence[int]) -> Group:
        """Return the group of the ranks at these pipeline ranks with this rank's dp, cp and tp
        coordinates, for tied weights.

        Every rank of the mesh must call this, in the same order and with the same ``pp_ranks``. A
        rank that is no member gets a group with ``rank`` -1, which it must not use. It makes a
        process group of itself alone: see NOTE [equal numbers of groups] in links.py.
        """
        pp_ranks = sorted(set(pp_ranks))
        if len(pp_ranks) == 1:
            return self._group("tied", (self.rank,))
        is_member = self.at.pp_rank in pp_ranks
        ranks = tuple(self.grid.rank(replace(self.at, pp_rank=pp_rank)) for pp_rank in pp_ranks)
        group = self._subgroup("tied", ranks if is_member else (self.rank,))
        return group if is_member else self._group("tied", ())

    def compare_digests(self, digest: str) -> None:
        """Check that all ranks have this digest: with another one their messages would not match.
        Collective; blocks.

        Raises:
            MeshError: names the ranks that differ from rank 0.
        """
        digests = self.world.gather_objects(digest)
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise MeshError(
                "MW-RUN-007",
                f"ranks {different} have another configuration, schedule or first values by"
                " model.builder than rank 0: start all of them with the same config file,"
                " overrides, code and files; a builder that walks a set of names, whose order"
                " differs between processes, sorts it",
            )

    def open_links(self, pairs: Collection[tuple[int, int]]) -> LinkedGroup:
        """Return the pipeline group with a link for each (source, destination) in ``pairs``.
        Collective over all ranks; blocks.
        """
        return open_links(self.pp, pairs, self._make, self.device)

    def _subgroup(self, name: str, ranks: tuple[int, ...]) -> Group:
        """Make a subgroup. Each rank passes its own subgroup's ranks;
        all ranks call it in the same order.
        """
        group = self._group(name, ranks, self._make(ranks))
        if self.device.type == "cuda":
            group.barrier()
        return group

    def _make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.timeout_s)
        process_group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout, use_local_synchronization=True
        )
        return process_group

    def _group(
        self, name: str, ranks: tuple[int, ...], process_group: dist.ProcessGroup | None = None
    ) -> Group:
        rank = ranks.index(self.rank) if ranks else -1
        return Group(name, ranks, rank, process_group, self.traffic, self.activity)


def environment_rank() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) from torchrun's environment variables;
    a lone process is rank 0 of 1.
    """
    variables = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not any(variables.values()):
        return 0, 1, 0
    rank = environment_number("RANK", 0, high=MAX_RANKS)
    world_size = environment_number("WORLD_SIZE", 0, high=MAX_RANKS)
    local_rank = environment_number("LOCAL_RANK", 0, high=MAX_RANKS)
    if not variables["RANK"] or rank >= world_size:
        raise MeshError(
            "MW-MESH-008",
            f"the environment has {variables}: RANK and WORLD_SIZE must both be set, and RANK counts"
            " from 0. Start with `meshwright train`, torchrun or srun, or unset all of them",
        )
    return rank, world_size, local_rank


def check_size(grid: Grid, world_size: int) -> None:
    """Check that as many ranks were started as the grid has.

    Raises:
        MeshError: the numbers differ.
    """
    if world_size != grid.size:
        raise MeshError(
            "MW-MESH-009",
            f"parallel.{grid} = {grid.size} ranks, but {world_size} were started: "
            f"change a degree, or start {grid.size} processes",
        )


def open_store(grid: Grid, timeout_s: float) -> Any:
    """Wait until all ranks have reached rank 0, and return the store that they share; blocks.

    Return None without waiting for a grid of one rank, or where an elastic agent (torchrun) holds a
    store.

    Raises:
        MeshError: the number of started ranks is not the grid's, ranks are missing, or rank 0
            cannot listen.
        CommunicationError: rank 0 has left, or does not answer.
    """
    rank, world_size, _ = environment_rank()
    check_size(grid, world_size)
    if grid.size == 1 or not needs_rendezvous():
        return None
    return open_rendezvous(rank, world_size, timeout_s)


def open_mesh(
    grid: Grid,
    device: str = "auto",
    *,
    timeout_s: float = 600.0,
    tp_across_nodes: bool = False,
    ep_across_nodes: bool = False,
    share_devices: bool = False,
    store: Any = None,
) -> Mesh:
    """Join the process group that the environment describes and make the groups of the axes.

    An already initialised process group of the right size is used as it is. A grid of one rank
    needs none at all.
    ``store``: from :func:`open_store`; None opens one here where it is needed. ``share_devices``:
        several ranks may
    have one GPU, and communicate by gloo instead of NCCL.

    Raises:
        MeshError: the world's size is not the grid's, ranks do not arrive, or a tp or ep group
            straddles nodes.
    """
    rank, world_size, local_rank = environment_rank()
    check_size(grid, world_size)
    chosen = pick_device(device, local_rank, share=share_devices)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if chosen.type == "cuda" and not share_devices else "gloo"
    process_groups: dict[Axis, dist.ProcessGroup] = {}
    if grid.size > 1:
        if not dist.is_initialized():
            opened_store = open_store(grid, timeout_s) if store is None else store
            _init_process_group(rank, backend, chosen, timeout, opened_store)
        process_groups = _axis_process_groups(grid, chosen, timeout)
    traffic, activity = Traffic(), Activity()

    def group_of(
        name: str, ranks: tuple[int, ...], process_group: dist.ProcessGroup | None
    ) -> Group:
        return Group(name, ranks, ranks.index(rank), process_group, traffic, activity)

    def new_process_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        made: dist.ProcessGroup = dist.new_group(ranks, timeout, use_local_synchronization=True)
        return made

    groups: dict[Axis, Group] = {}
    for axis in Axis:
        ranks = grid.replicas(rank) if axis is Axis.DP else grid.group(axis, rank)
        groups[axis] = group_of(axis, ranks, process_groups.get(axis))
    ep_ranks = expert_group(grid, rank)
    ep = group_of("ep", ep_ranks, new_process_group(ep_ranks))
    same_experts = expert_replicas(grid, rank) if grid.ep > 1 else (rank,)
    experts = group_of("experts", same_experts, new_process_group(same_experts))
    everybody = dist.group.WORLD if grid.size > 1 else None
    world = group_of("world", tuple(range(grid.size)), everybody)
    # NCCL needs all ranks of a group in its first call: point-to-point calls have two
    if chosen.type == "cuda":
        for group in (*groups.values(), ep, experts):
            group.barrier()
    nodes = world.gather_objects(node_name())
    check_placement(grid, nodes, tp_across_nodes=tp_across_nodes, ep_across_nodes=ep_across_nodes)
    return Mesh(
        grid=grid,
        rank=rank,
        device=chosen,
        pp=groups[Axis.PP],
        replicas=groups[Axis.DP],
        tp=groups[Axis.TP],
        world=world,
        traffic=traffic,
        nodes=nodes,
        timeout_s=timeout_s,
        activity=activity,
        cp=groups[Axis.CP],
        ep=ep,
        expert_replicas=experts,
    )


def _init_process_group(
    rank: int, backend: str, device: torch.device, timeout: timedelta, store: Any
) -> None:
    """Join torch's default process group: by ``store``,
    or by the environment variables of an elastic agent.
    """
    by_store: dict[str, Any] = {}
    if store is not None:
        by_store = {"store": store, "rank": rank, "world_size": environment_rank()[1]}
    device_id = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timeout, device_id=device_id, **by_store)


def _axis_process_groups(
    grid: Grid, device: torch.device, timeout: timedelta
) -> dict[Axis, dist.ProcessGroup]:
    """Make this rank's process group of each axis with more than one rank."""
    degrees = {Axis.PP: grid.pp, Axis.DP: grid.num_replicas, Axis.TP: grid.tp}
    torch_mesh = init_device_mesh(
        device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
    )
    group_of = {
        axis: torch_mesh.get_group(str(axis)) for axis, degree in degrees.items() if degree > 1
    }
    if grid.cp > 1:  # torch's mesh has the replicas, dp x cp, as one dim
        group_of[Axis.CP] = dist.new_group(
            grid.group(Axis.CP, dist.get_rank()), timeout, use_local_synchronization=True
        )
    # a DeviceMesh sets torch's default timeout: 10 minutes, with gloo 30
    for process_group in group_of.values():
        dist.distributed_c10d._set_pg_timeout(timeout, process_group)
    return group_of


def close_mesh(mesh: Mesh) -> None:
    """Close the mesh: barrier over all ranks, then destroy the process groups. Blocks."""
    if mesh.grid.size > 1 and dist.is_initialized():
        mesh.world.barrier()
        dist.destroy_process_group()


def abort_groups() -> None:
    """End all collectives of this process with an error: threads that block in one raise.

    Any thread may call it. The groups cannot be used afterwards; :func:`leave_mesh` closes them.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":  # communicators that share a device are aborted together
        dist.distributed_c10d._abort_process_group()
        return
    for process_group in list(dist.distributed_c10d._world.pg_map):
        process_group.abort()


def leave_mesh() -> None:
    """Close the groups of a mesh that has lost a rank, without a barrier. Does not block."""
    if dist.is_initialized():
        dist.destroy_process_group()
