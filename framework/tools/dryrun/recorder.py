"""Recorder of one rank's storage lifetimes and communication, operation by operation.

    operation      1   2   3   4   5          a storage lives from the operation that made it to the last one before
    storage  a     |-----------|              its release; live bytes after operation t are those of all alive at t
    storage  b         |-------------->       resized: one life ends, another begins with the new size

It records real tensors and fake ones, whose storages have the right size and no memory. A hook costs a few
microseconds; everything else is computed from the records afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.mesh.fake import InterceptedOperation, OperationInterceptor, is_on_dtensor
from meshwright.model.recorder import Operation, OperationRecorder, StorageRegistry

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


class Recorder(OperationRecorder):  # type: ignore[no-untyped-call]
    """Dispatch mode that records storages and communication.

    Enter it before anything is built, above a FakeTensorMode if there is one.
    """

    def __init__(self, first_number: int = 0) -> None:
        """Start an empty recorder; storages are numbered from ``first_number``."""
        super().__init__()
        self.now = 0
        """Number of operations so far."""
        self.lives: list[StorageLife] = []
        self.said: list[RecordedCommunication] = []
        self.begun: list[ActivityStart] = []
        self._current: dict[int, StorageLife] = {}
        """Storage number -> its present life."""
        self._storages = StorageRegistry(self._end, first_number)
        self._interceptor = OperationInterceptor()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # autograd queries the device often; a fake tensor must not report its inner meta
            device = getattr(args[0], "fake_device", None)
            return func(*args) if device is None else device
        if is_on_dtensor(types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def record(self, operation: Operation) -> None:
        """Record the storages that an operation has made or resized, and its communication."""
        self.now += 1
        for tensor in operation.outputs:
            if tensor.device.type != "meta":
                self._look(tensor)
        heard = self._interceptor.intercept(operation.function, operation.args)
        if heard is not None:
            numbers = tuple(self.number_of(tensor) for tensor in operation.inputs)
            self.said.append(RecordedCommunication(self.now, heard, numbers))

    def begin(self, what: object) -> None:
        """Record the start of an activity of the rank."""
        self.now += 1  # a release before the first operation of ``what`` belongs to ``what``
        self.begun.append(ActivityStart(self.now, what))

    def _look(self, tensor: Tensor) -> None:
        num_bytes = tensor.untyped_storage().nbytes()
        number = self._storages.find(tensor)
        if number is None:
            self._begin(self._storages.add(tensor), num_bytes)
        elif self._current[number].num_bytes != num_bytes:
            self._resize(number, num_bytes, self.now)

    def _begin(self, number: int, num_bytes: int) -> None:
        self._current[number] = life = StorageLife(number, num_bytes, self.now, self.now)
        self.lives.append(life)

    def _end(self, number: int) -> None:
        self._current.pop(number).died = self.now

    def _resize(self, number: int, num_bytes: int, at: int) -> None:
        """Record that the storage has ``num_bytes`` from operation ``at`` on."""
        before = self._current[number]
        before.died = at - 1
        self._current[number] = life = StorageLife(number, num_bytes, at, before.first)
        self.lives.append(life)

    def next_number(self) -> int:
        """Return the number for a new storage."""
        return self._storages.next_number()

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; a storage that no operation has shown before gets its number now."""
        number = self._storages.find(tensor)
        if number is None:
            number = self._storages.add(tensor)
            self._begin(number, tensor.untyped_storage().nbytes())
        return number

    def numbers_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of all tensors whose storage is recorded."""
        return {number for number in map(self._storages.find, tensors) if number is not None}

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Record manual storage resizes inside the context.

        They are not dispatched operations; torch's fully_shard frees memory by them.
        """
        storage_class: Any = torch.UntypedStorage
        resize = storage_class.resize_

        def noted(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            number = self._storages.find_storage(storage)
            if number is not None and self._current[number].num_bytes != size:
                self._resize(number, size, self.now + 1)
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
