"""Recorder of one rank's storage lifetimes and communication, operation by operation.

    operation      1   2   3   4   5          a storage lives from the operation that made it to the last one before
    storage  a     |-----------|              its release; live bytes after operation t are those of all alive at t
    storage  b         |-------------->       resized: one life ends, another begins with the new size

It records real tensors and fake ones, whose storages have the right size and no memory. A hook costs a few
microseconds; everything else is computed from the notes afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.mesh.intercept import NAMESPACES, InterceptedOperation, OperationInterceptor, is_on_dtensor

ALIVE = 2**62
_DEVICE = torch.ops.prim.device.default


class StorageLife:
    """Lifetime of a storage at one size."""

    __slots__ = ("born", "died", "first", "num_bytes", "number")

    def __init__(self, number: int, num_bytes: int, born: int, first: int) -> None:
        self.number = number
        """Number of the storage, the same for all its lives."""
        self.num_bytes = num_bytes
        self.born = born
        """First operation after which this life exists."""
        self.died = ALIVE
        """Last operation after which this life exists."""
        self.first = first
        """Operation that made the storage, at its first size."""


class RecordedCommunication(NamedTuple):
    """Communication operation, its time and the storages of its tensors."""

    at: int
    heard: InterceptedOperation
    storages: tuple[int, ...]


class ActivityStart(NamedTuple):
    """Start of an activity ``what`` of the rank; ``at`` counts as an operation."""

    at: int
    what: object


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records storages and communication.

    Enter it before anything is built, above a FakeTensorMode if there is one.
    """

    def __init__(self, first_number: int = 0) -> None:
        """Start an empty recorder; storages are numbered from ``first_number``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Number of operations so far."""
        self.lives: list[StorageLife] = []
        self.said: list[RecordedCommunication] = []
        self.begun: list[ActivityStart] = []
        self._known: dict[int, tuple[weakref.ref[Any], StorageLife]] = {}
        self._next_number = first_number
        self._ear = OperationInterceptor()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is _DEVICE:  # autograd queries the device often; a fake tensor must not report its inner meta
            device = getattr(arguments[0], "fake_device", None)
            return function(*arguments) if device is None else device
        if is_on_dtensor(types):
            return NotImplemented
        results = function(*arguments, **(options or {}))
        self.now += 1
        if isinstance(results, Tensor):
            self._look(results)
        else:
            for leaf in tree_leaves(results):
                if isinstance(leaf, Tensor):
                    self._look(leaf)
        if function.namespace in NAMESPACES:
            heard = self._ear.hear(function, arguments)
            if heard is not None:
                leaves = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
                self.said.append(RecordedCommunication(self.now, heard, tuple(self.number_of(leaf) for leaf in leaves)))
        return results

    def begin(self, what: object) -> None:
        """Record the start of an activity of the rank."""
        self.now += 1  # a release before the first operation of ``what`` belongs to ``what``
        self.begun.append(ActivityStart(self.now, what))

    def _look(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            self._begin(key, storage, num_bytes, None)
        elif known[1].num_bytes != num_bytes:
            self._resized(storage, num_bytes, self.now)

    def _begin(self, key: int, storage: Any, num_bytes: int, before: StorageLife | None, at: int | None = None) -> None:
        born = self.now if at is None else at
        if before is None:
            life = StorageLife(self.next_number(), num_bytes, born, born)
        else:
            life = StorageLife(before.number, num_bytes, born, before.first)
        self.lives.append(life)
        known = self._known

        def gone(_: object) -> None:
            self._known_ended(key)

        known[key] = (weakref.ref(storage, gone), life)

    def _known_ended(self, key: int) -> None:
        entry = self._known.pop(key, None)
        if entry is not None:
            entry[1].died = self.now

    def _resized(self, storage: Any, num_bytes: int, at: int) -> None:
        """Record that the storage has ``num_bytes`` from operation ``at`` on."""
        key = storage._cdata
        _, life = self._known[key]
        life.died = at - 1
        self._begin(key, storage, num_bytes, life, at)

    def next_number(self) -> int:
        """Return the number for a new storage."""
        self._next_number += 1
        return self._next_number - 1

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; a storage that no operation has shown before gets its number now."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._begin(storage._cdata, storage, storage.nbytes(), None)
        return self._known[storage._cdata][1].number

    def numbers_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of all tensors whose storage is recorded."""
        keys = (tensor.untyped_storage()._cdata for tensor in tensors)
        return {self._known[key][1].number for key in keys if key in self._known}

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Record manual storage resizes inside the context.

        They are not dispatched operations; torch's fully_shard frees memory by them.
        """
        storage_class: Any = torch.UntypedStorage
        resize = storage_class.resize_

        def noted(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._known and self._known[storage._cdata][1].num_bytes != size:
                self._resized(storage, size, self.now + 1)
            return found

        storage_class.resize_ = noted
        try:
            yield
        finally:
            del storage_class.resize_


def live_bytes(lives: Iterable[StorageLife], first: int, last: int) -> list[int]:
    """Return the live bytes after each of the operations ``first`` .. ``last``."""
    changes = [0] * (last - first + 2)
    for life in lives:
        if life.died >= first and life.born <= last:
            changes[max(life.born, first) - first] += life.num_bytes
            changes[min(life.died, last) + 1 - first] -= life.num_bytes
    total, found = 0, []
    for change in changes[:-1]:
        total += change
        found.append(total)
    return found
