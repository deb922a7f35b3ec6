"""Fake transport for dry runs: the mesh of one rank of a job of any size, in one process,
and its messages.

    job of 16,384      fake_mesh(grid, rank) ----->  the Mesh that this rank would have: its groups and coordinates
    this process       torch's "fake" backend         a collective returns at once and leaves its tensors as they are
                       OperationInterceptor           collectives of torch, translated to the names of comm.py

The code of a rank (our groups, megatron-core's regions, torch's fully_shard) runs here unchanged,
without its peers. Only the groups of this rank are made: all groups of 16,384 ranks would take
minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from meshwright.errors import MeshError
from meshwright.mesh.activity import Activity
from meshwright.mesh.comm import Group, even_shares, tensor_bytes
from meshwright.mesh.expert_groups import expert_group, expert_replicas
from meshwright.mesh.grid import Axis, Grid
from meshwright.mesh.handles import CollectiveHandle
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.traffic import WIRE_FACTORS, Traffic

PRIVATE_TORCH = {
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "2.11-2.15",
    "torch.distributed.distributed_c10d._resolve_process_group": "2.11-2.15",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "2.11-2.15",
    "torch.ScriptObject._type": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


class FakeGroup(Group):
    """Group over torch's fake backend. Only this rank exists;
    values of other ranks are assumed equal to its own.
    """

    takes_turns = False

    def gather_objects(self, value: Any, *kinds: type) -> list[Any]:
        """Return this rank's value once per rank of the group."""
        return [value] * self.size

    def host_counts(self, counts: Tensor, total: int) -> list[list[int]]:
        """Share out ``total`` evenly in each row, the rest to the first ranks."""
        return [even_shares(total, self.size) for _ in counts]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the DeviceMesh, built from a real tensor
        of rank numbers even under FakeTensorMode.
        """
        with unset_fake_temporarily():
            return super().device_mesh(device_type)


class CountingGroup(Group):
    """Group without a process group, for tensors on the meta device:
    counts the traffic of collectives.
    """

    repeats = 1
    """Number of chunks that the present one stands for."""

    def begin_collective(self, operation: str, tensor: Tensor, parts: int = 1) -> None:
        """Count a collective of megatron-core, also of a meta tensor."""
        self._count(operation, tensor_bytes(tensor) * parts)

    def chunks(self, starts: Sequence[int]) -> Iterator[int]:
        """Yield the first chunk alone; meanwhile ``repeats`` is the number of chunks
        that it stands for.
        """
        if not starts:
            return
        self.repeats = len(starts)
        try:
            yield starts[0]
        finally:
            self.repeats = 1

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", finish: Callable[[], object] | None = None
    ) -> CollectiveHandle:
        """Count an all-reduce; the tensor keeps its shape."""
        if self.size > 1:
            self._count("all_reduce", tensor_bytes(tensor))
        return CollectiveHandle(finish=finish)

    def all_gather(self, out: Tensor, part: Tensor) -> CollectiveHandle:
        """Count an all-gather; ``out`` keeps its shape."""
        if self.size > 1:
            self._count("all_gather", tensor_bytes(out))
        return CollectiveHandle()

    def all_to_all(
        self, out: Tensor, whole: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> CollectiveHandle:
        """Count an all-to-all by the larger of the bytes sent and received."""
        if self.size > 1:
            self._count("all_to_all", max(tensor_bytes(out), tensor_bytes(whole)))
        return CollectiveHandle()


class PlaceholderGroup(FakeGroup):
    """Group of a rank that is chosen later, for layers that are sharded before any mesh exists."""

    def assign(self, other: Group) -> None:
        """Take over the ranks and the process group of ``other``,
        which has the same size and rank.
        """
        assert (self.size, self.rank) == (other.size, other.rank), (self, other)
        vars(self).update(vars(other))


class FakeMesh(Mesh):
    """Mesh over torch's fake backend, with the groups of this rank alone."""

    def _group(
        self, name: str, ranks: tuple[int, ...], process_group: dist.ProcessGroup | None = None
    ) -> Group:
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
def fake_mesh(
    grid: Grid, rank: int, on_begin: Callable[[object], None] = _ignore, device: str = "cpu"
) -> Iterator[Mesh]:
    """Open the mesh of ``rank`` inside the context, over torch's fake backend.

    Args:
        on_begin: called with each activity that the rank begins.
        device: device of the rank's tensors.

    Raises:
        MeshError: this process is a rank of a real job, whose process groups would be lost.
    """
    assert 0 <= rank < grid.size, (rank, grid.size)
    if dist.is_initialized():
        raise MeshError(
            "MW-MESH-004",
            "this process has joined a job already: dry-run a rank in a process of its own, before"
            " a job starts",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # replaced by torch, to put the rank before each line of a traceback
    # tensor_parallel/megatron.py replaces it for CPU tensors
    current_device = torch.cuda.current_device
    traffic, activity = Traffic(), _ObservedActivity(on_begin)
    if grid.size > 1:
        dist.init_process_group("fake", rank=rank, world_size=grid.size, store=FakeStore())
    try:
        axes = {}
        for axis in Axis:
            ranks = grid.replicas(rank) if axis is Axis.DP else grid.group(axis, rank)
            process_group = None
            if len(ranks) > 1:
                process_group = dist.new_group(list(ranks), use_local_synchronization=True)
            axes[axis] = FakeGroup(axis, ranks, ranks.index(rank), process_group, traffic, activity)
        everybody = dist.group.WORLD if grid.size > 1 else None
        world = FakeGroup("world", tuple(range(grid.size)), rank, everybody, traffic, activity)
        pp, dp, tp = axes[Axis.PP], axes[Axis.DP], axes[Axis.TP]
        shared = {
            "ep": expert_group(grid, rank),
            "experts": expert_replicas(grid, rank) if grid.ep > 1 else (rank,),
        }
        local: dict[str, Any] = {"use_local_synchronization": True}
        made_of = {
            n: dist.new_group(r, **local, group_desc=n) if r[1:] else None
            for n, r in shared.items()
        }
        ep, same = (
            FakeGroup(n, r, r.index(rank), made_of[n], traffic, activity) for n, r in shared.items()
        )
        nodes = ["node0"] * grid.size
        place = grid, rank, torch.device(device)
        yield FakeMesh(
            *place, pp, dp, tp, world, traffic, nodes, 600.0, activity, axes[Axis.CP], ep, same
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook, torch.cuda.current_device = hook, current_device


Ranks = tuple[int, ...]

NAMESPACES = ("c10d", "_c10d_functional")
OPERATIONS = {
    "c10d.allreduce_": "all_reduce",
    "c10d.allreduce_coalesced_": "all_reduce",
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_reduce_": "all_reduce",
    "_c10d_functional.all_reduce_coalesced": "all_reduce",
    "c10d._allgather_base_": "all_gather",
    "c10d.allgather_": "all_gather",
    "c10d.allgather_into_tensor_coalesced_": "all_gather",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.all_gather_into_tensor_out": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.reduce_scatter_": "reduce_scatter",
    "c10d.reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "c10d.alltoall_base_": "all_to_all",
    "c10d.alltoall_": "all_to_all",
    "_c10d_functional.all_to_all_single": "all_to_all",
    "c10d.broadcast_": "broadcast",
    "c10d.send": "send",
    "c10d.recv_": "receive",
}
SILENT = {"c10d.barrier", "c10d.monitored_barrier_", "_c10d_functional.wait_tensor"}
_WIRE_FACTORS: dict[str, Callable[[int], float]] = {**WIRE_FACTORS, "receive": lambda n: 0.0}


class InterceptedOperation(NamedTuple):
    """One communication of one rank."""

    operation: str
    group: Ranks
    """Global ranks, in the order of the group."""
    peer: int | None
    """The global rank at the other end of a send or receive."""
    num_bytes: int
    """Bytes of the message: the full tensor."""
    dtype: str
    name: str = ""
    """``group_desc`` of the process group: "ep" marks an expert group,
    whose ranks may equal those of another axis.
    """

    @property
    def wire_bytes(self) -> float:
        """Return this rank's bytes on the wire,
        by the ring formulas of :mod:`meshwright.mesh.traffic`.
        """
        return _WIRE_FACTORS[self.operation](len(self.group)) * self.num_bytes


def num_bytes(values: Any) -> int:
    """Return the bytes of all tensors in a tree of values."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor)
    )


def is_on_dtensor(types: Sequence[type]) -> bool:
    """Return True for an operation on a DTensor:
    its operations on local tensors are intercepted themselves.
    """
    return any(issubclass(kind, DTensor) for kind in types)


class OperationInterceptor:
    """Interpreter of intercepted operations. Caches the ranks of groups by name,
    since there may be thousands.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, Ranks] = {}
        self._names: dict[str, str] = {}

    def intercept(self, function: Any, arguments: Sequence[Any]) -> InterceptedOperation | None:
        """Return the communication of a dispatched operation;
        None for one that sends nothing (a wait, a barrier).
        """
        if function.namespace not in NAMESPACES:
            return None
        name = str(function.overloadpacket)
        communicator = None if name in SILENT else self.communicator_of(arguments)
        if communicator is None:
            return None
        ranks = self._ranks[communicator]
        assert name in OPERATIONS, f"{name} is missing in OPERATIONS"
        kind = OPERATIONS[name]
        first = next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        size = num_bytes(arguments[0])
        peer = None
        if kind in ("all_gather", "reduce_scatter"):
            # out-of-place forms have only the input: part of what is gathered, all of what is
            # scattered
            size = max(size, num_bytes(arguments[1]))
            if name == "_c10d_functional.all_gather_into_tensor":
                size = num_bytes(arguments[0]) * len(ranks)
        elif kind in ("send", "receive"):
            peer = ranks[arguments[2]]
        dtype = str(first.dtype).removeprefix("torch.")
        return InterceptedOperation(kind, ranks, peer, size, dtype, self._names[communicator])

    def communicator_of(self, arguments: Sequence[Any]) -> str | None:
        """Return the name of the process group, None without one.
        Links of two directions differ only in the name.
        """
        # a string before the last names an operation, not a group
        for argument in reversed(arguments):
            if isinstance(argument, str):
                name = argument
            elif isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(
                argument._type()
            ):
                name = str(dist.ProcessGroup.unbox(argument).group_name)
            else:
                continue
            if name not in self._ranks:
                group = _resolve_process_group(name)  # type: ignore[arg-type]
                self._ranks[name] = tuple(dist.get_process_group_ranks(group))
                self._names[name] = str(group.group_desc)
            return name
        return None
