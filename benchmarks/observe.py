"""Memory and communication of a rank, observed below every tensor operation,
in the same way for all contenders.

Live bytes are those of all storages that any operation has made since the observer was entered and
that still live. Enter it before the model is built. Bytes on the wire follow from the collectives
that reach a process group, by the ring formulas (n ranks, a message of M bytes, the whole tensor):

    all-reduce 2 M (n-1)/n     all-gather, reduce-scatter, all-to-all M (n-1)/n     send M

The observer slows a step down several times over: use it only for steps that are not timed.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALL_REDUCE = {"c10d.allreduce_", "c10d.allreduce_coalesced_", "_c10d_functional.all_reduce"}
ALL_REDUCE |= {"_c10d_functional.all_reduce_", "_c10d_functional.all_reduce_coalesced"}
INTO_LARGER = {"c10d._allgather_base_", "c10d.allgather_", "c10d.allgather_into_tensor_coalesced_"}
INTO_LARGER |= {
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.all_gather_into_tensor_out",
}
INTO_SMALLER = {
    "c10d._reduce_scatter_base_",
    "c10d.reduce_scatter_",
    "c10d.reduce_scatter_tensor_coalesced_",
}
INTO_SMALLER |= {"_c10d_functional.reduce_scatter_tensor"}
ALL_TO_ALL = {"c10d.alltoall_base_", "c10d.alltoall_", "_c10d_functional.all_to_all_single"}
BROADCAST = {"c10d.broadcast_"}
SEND = {"c10d.send"}
SILENT = {"c10d.recv_", "c10d.barrier", "c10d.monitored_barrier_"}

GLOO_RELEASES_S = 0.002
"""Time before a new peak is counted. After a wait, gloo's thread still holds the tensors of its
collective for a moment; on busy cores one bucket of 47 cases was counted that the rank itself had
released.
"""


def num_bytes(values: Any) -> int:
    """Return the bytes of all tensors in a tree of values."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor)
    )


def group_of(arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the global ranks of the process group among the arguments,
    or None without one (a wait, a wrapper).
    """
    for argument in reversed(arguments):  # a string before the last names an operation, not a group
        if isinstance(argument, str):
            return tuple(dist.get_process_group_ranks(_resolve_process_group(argument)))  # type: ignore[arg-type]
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    return None


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observer of one rank. Enter it, build, ``restart()``, take the step to observe,
    read the results.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._listening = False
        self.peak_bytes = 0
        self.wire_bytes: dict[tuple[int, ...], float] = defaultdict(float)
        """Bytes on the wire, by the ranks of the group."""

    def restart(self) -> None:
        """Reset the peak and the bytes on the wire, and record from here on."""
        self.peak_bytes = self.live_bytes()
        self.wire_bytes.clear()
        self._listening = True

    def live_bytes(self) -> int:
        """Return the bytes of all live storages at their present size:
        FSDP2 frees by resizing them to nothing.
        """
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched on their own
        if self._listening and function.namespace in ("c10d", "_c10d_functional"):
            self._listen(str(function.overloadpacket), arguments)
        results = function(*arguments, **(options or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                known = self._storages.get(storage._cdata)
                # an address is reused when its storage is gone
                if known is None or known() is None:
                    self._storages[storage._cdata] = weakref.ref(storage)
        if self._listening and self.live_bytes() > self.peak_bytes:
            time.sleep(GLOO_RELEASES_S)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return results

    def _listen(self, name: str, arguments: tuple[Any, ...]) -> None:
        ranks = group_of(arguments)
        if ranks is None or name in SILENT:
            return
        n = len(ranks)
        if name in ALL_REDUCE:
            self.wire_bytes[ranks] += 2 * (n - 1) / n * num_bytes(arguments[0])
        elif name in INTO_LARGER | INTO_SMALLER:
            # out-of-place forms have only the input: part of what is gathered, all of what is
            # scattered
            whole = max(num_bytes(arguments[0]), num_bytes(arguments[1]))
            if name.startswith("_c10d_functional.all_gather"):
                whole = num_bytes(arguments[0]) * n
            self.wire_bytes[ranks] += (n - 1) / n * whole
        elif name in BROADCAST | ALL_TO_ALL:
            self.wire_bytes[ranks] += (n - 1) / n * num_bytes(arguments[0])
        elif name in SEND:
            self.wire_bytes[ranks] += num_bytes(arguments[0])
        else:
            raise AssertionError(f"{name}: say what it puts on the wire")
