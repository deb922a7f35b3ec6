"""Recorder of tensor operations, the base of every figure that is not measured on a device.

    operation -> Operation: its FLOPs, its bytes, its tensors -> record()
                 Meter (model/meter/counting.py)    FLOPs, bytes and time on a reference device
                 WorkRecorder (meshwright_plan)     work to be timed, and the live bytes of a layer
                 StepRecorder (meshwright_plan)     the life of each storage of a step, and its communication

Only shapes matter, so tensors may be real, fake, or on the meta device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from meshwright.model.meter.shape_cache import MAX_KNOWN, KnownResult, describe_result, key_of

aten = torch.ops.aten
PICKS = {
    aten.embedding: 0,
    aten.index_select: 0,
    aten.gather: 0,
    aten.index: 0,
    aten.nll_loss_forward: 0,
}
"""Gather operations -> position of the argument gathered from,
of which as many bytes are read as written.
"""
NOT_READ = {aten.nll_loss_backward: 1, aten.copy_: 0, aten.fill_: 0, aten.zero_: 0}
"""Operations -> position of an argument that is not read: it is overwritten,
or only its shape is used.
"""
SCATTERS = {aten.index_put_, aten.index_add_, aten.scatter_, aten.scatter_add_}
"""In-place operations that read and write as many bytes of the changed tensor
as their other arguments have.
"""


class Operation(NamedTuple):
    """One tensor operation that has run."""

    function: Any
    """Overload of an operator, such as ``torch.ops.aten.mm.default``."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    counted: tuple[float, float] | None = None
    """(FLOPs, bytes), known from an equal earlier operation."""

    @property
    def packet(self) -> Any:
        """Operator without its overload, such as ``torch.ops.aten.mm``."""
        return self.function._overloadpacket

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return _tensors((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Tensor]:
        """Tensors in the result."""
        return [self.result] if isinstance(self.result, Tensor) else _tensors(self.result)

    @property
    def flops(self) -> float:
        """FLOPs of a product, convolution or attention, by the formulas of torch's FlopCounterMode;
        otherwise 0.
        """
        if self.counted is not None:
            return self.counted[0]
        # torch has no formula: a (R, k) by b (E, k, n), or a (m, R) by b (R, n)
        if self.packet is aten._grouped_mm:
            return float(2 * self.args[0].numel() * self.args[1].shape[-1])
        formula = flop_registry.get(self.packet)
        return float(formula(*self.args, **self.kwargs, out_val=self.result)) if formula else 0.0

    @property
    def num_bytes(self) -> float:
        """Bytes read and written; 0 for views and for allocations."""
        if self.counted is not None:
            return self.counted[1]
        packet = self.packet
        name = packet.__name__
        read: dict[int, float] = {}
        changed: dict[int, float] = {}
        storages = set()
        for position, argument in enumerate(self.function._schema.arguments):
            if position < len(self.args):
                given = self.args[position]
            else:
                given = self.kwargs.get(argument.name)
            for tensor in _tensors(given):
                storages.add(tensor.untyped_storage()._cdata)
                if NOT_READ.get(packet) != position and not argument.is_out:
                    read[id(tensor)] = stored_bytes(tensor)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    changed[id(tensor)] = stored_bytes(tensor)
        written = sum(
            stored_bytes(t)
            for t in _tensors(self.result)
            if t.untyped_storage()._cdata not in storages
        )
        if name.removeprefix("new_").startswith("empty") or not (written or changed):
            return 0.0
        if name.startswith("new_") or name.endswith("_like"):
            return written
        if packet in PICKS:
            source = self.args[PICKS[packet]]
            read[id(source)] = min(written, stored_bytes(source))
        if packet in SCATTERS:
            return 3.0 * sum(size for tensor, size in read.items() if tensor not in changed)
        return sum(read.values()) + written + sum(changed.values())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def stored_bytes(tensor: Tensor) -> float:
    """Return the bytes of the distinct elements in memory: an expanded dim counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return float(
        math.prod(size for size, stride in sizes if stride != 0 or size == 0) * tensor.itemsize
    )


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs each operation and passes it to :meth:`record`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def record(self, operation: Operation) -> None:
        """Record an operation that has just run."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = run_once(func, args, kwargs or {})
        self.record(operation)
        return operation.result


_KNOWN: dict[Any, KnownResult | None] = {}
"""Key of an operation on meta -> its result; None: the operation has to run each time."""


def run_once(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
    """Run an operation; on meta, return new tensors with the shapes
    of an equal earlier operation's result.
    """
    key = key_of(function, args, kwargs)
    known = _KNOWN.get(key) if key is not None else None
    if known is not None:
        return Operation(function, args, kwargs, known.create(args), (known.flops, known.num_bytes))
    operation = Operation(function, args, kwargs, function(*args, **kwargs))
    if key is not None and key not in _KNOWN:
        described = describe_result(function, args, kwargs, operation.result)
        if len(_KNOWN) >= MAX_KNOWN:
            _KNOWN.clear()
        counted = described and described._replace(
            flops=operation.flops, num_bytes=operation.num_bytes
        )
        _KNOWN[key] = counted
    return operation


class StorageRegistry:
    """Numbers of live storages: views share one,
    and no number is reused for a later storage at the same address.
    """

    def __init__(self, on_release: Callable[[int], None], first_number: int = 0) -> None:
        """Create an empty registry.

        Args:
            on_release: called with the number of a storage when its last tensor is gone; may not
                keep the caller alive.
        """
        self._on_release = on_release
        self._next_number = first_number
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def next_number(self) -> int:
        """Return a number that no storage has."""
        self._next_number += 1
        return self._next_number - 1

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None: it is not registered."""
        return self.find_storage(tensor.untyped_storage())

    def find_storage(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage; None: it is not registered."""
        known = self._live.get(storage._cdata)
        return None if known is None else known[0]

    def add(self, tensor: Tensor) -> int:
        """Register the storage of a tensor and return its number."""
        storage, number = tensor.untyped_storage(), self.next_number()
        key, live, on_release = storage._cdata, self._live, self._on_release

        def release(_: object) -> None:
            del live[key]
            on_release(number)

        self._live[key] = number, weakref.ref(storage, release)
        return number

    def numbers(self) -> set[int]:
        """Return the numbers of all registered storages that still live."""
        return {number for number, _ in self._live.values()}
