"""Collectives intercepted at the dispatcher: c10d operations translated to the operation names of comm.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from meshwright.mesh.comm import WIRE_FACTORS

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
_WIRE_FACTORS: dict[str, Callable[[int], float]] = {
    **WIRE_FACTORS,
    "all_to_all": WIRE_FACTORS["reduce_scatter"],
    "receive": lambda n: 0.0,
}


class Heard(NamedTuple):
    """One communication operation of one rank."""

    operation: str
    group: Ranks
    """Global ranks, in the order of the group."""
    peer: int | None
    """Global rank at the other end of a send or receive; None for a collective."""
    num_bytes: int
    """Bytes of the message: the whole tensor, not one rank's part."""
    dtype: str

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank puts on the wire, by the ring formulas of :mod:`meshwright.mesh.comm`."""
        return _WIRE_FACTORS[self.operation](len(self.group)) * self.num_bytes


def num_bytes(values: Any) -> int:
    """Return the bytes of all tensors in a nested structure."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def hears_parts(types: Sequence[type]) -> bool:
    """Return True for an operation on a DTensor, whose operations on local tensors are intercepted separately."""
    return any(issubclass(kind, DTensor) for kind in types)


class Ear:
    """Translator from c10d operations to :class:`Heard`. Caches the ranks of each group by its name."""

    def __init__(self) -> None:
        self._ranks: dict[str, Ranks] = {}

    def hear(self, function: Any, arguments: Sequence[Any]) -> Heard | None:
        """Return the operation that ``function`` performs; None if it moves no data (a wait, a barrier)."""
        name = str(function.overloadpacket)
        ranks = None if name in SILENT else self._group(arguments)
        if ranks is None:
            return None
        assert name in OPERATIONS, f"{name}: say what it puts on the wire"
        operation = OPERATIONS[name]
        first = next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        size = num_bytes(arguments[0])
        peer = None
        if operation in ("all_gather", "reduce_scatter"):
            # out-of-place forms have only the input: part of what is gathered, all of what is scattered
            size = max(size, num_bytes(arguments[1]))
            if name == "_c10d_functional.all_gather_into_tensor":
                size = num_bytes(arguments[0]) * len(ranks)
        elif operation in ("send", "receive"):
            peer = ranks[arguments[2]]
        return Heard(operation, ranks, peer, size, str(first.dtype).removeprefix("torch."))

    def _group(self, arguments: Sequence[Any]) -> Ranks | None:
        for argument in reversed(arguments):  # a string before the last names an operation, not a group
            if isinstance(argument, str):
                name = argument
            elif isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                name = str(dist.ProcessGroup.unbox(argument).group_name)
            else:
                continue
            if name not in self._ranks:
                group = _resolve_process_group(name)  # type: ignore[arg-type]
                self._ranks[name] = tuple(dist.get_process_group_ranks(group))
            return self._ranks[name]
        return None
