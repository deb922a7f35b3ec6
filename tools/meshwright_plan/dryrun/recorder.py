"""Recorder of one rank's storage lifetimes and communication, operation by operation.

    operation      1   2   3   4   5          a storage lives from the operation that made it to the last one before
    storage  a     |-----------|              its release; live bytes after operation t are those of all alive at t
    storage  b         |-------------->       resized: one life ends, another begins with the new size

It records real tensors, and fake ones, whose storages have a size and no memory. Recording an
operation takes a few microseconds; all figures are computed from the records afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.mesh.fake import InterceptedOperation, OperationInterceptor, is_on_dtensor
from meshwright.model.meter import Operation, OperationRecorder, StorageRegistry

ALIVE = 2**62
_DEVICE = torch.ops.prim.device.default


@dataclass(slots=True, eq=False)
class StorageLife:
    """Lifetime of a storage at one size."""

    number: int
    """Number of the storage, the same for all its lives."""
    num_bytes: int
    born: int
    """First operation after which this life exists."""
    first: int
    """Operation that made the storage; equal in all its lives."""
    died: int = ALIVE
    """Last operation after which this life exists."""


class RecordedCommunication(NamedTuple):
    """Communication operation, its operation number and the storages of its tensors."""

    at: int
    call: InterceptedOperation
    storages: tuple[int, ...]


class ActivityStart(NamedTuple):
    """Start of an activity of the rank (an action, messages, a text);
    it takes an operation number of its own.
    """

    at: int
    activity: object


class StepRecorder(OperationRecorder):  # type: ignore[no-untyped-call]
    """Dispatch mode that records storages and communication.

    Enter it before anything is built, above a FakeTensorMode if there is one.
    """

    def __init__(self, first_number: int = 0) -> None:
        """Start an empty recorder; storages are numbered from ``first_number``."""
        super().__init__()
        self.now = 0
        """Number of operations so far."""
        self.lives: list[StorageLife] = []
        self.communication: list[RecordedCommunication] = []
        self.activities: list[ActivityStart] = []
        self.on_host: set[int] = set()
        """Numbers of storages that are host memory also in a run on CUDA."""
        self._current: dict[int, StorageLife] = {}
        """Storage number -> its current life."""
        self._storages = StorageRegistry(self._end_life, first_number)
        self._interceptor = OperationInterceptor()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # autograd queries the device often; a fake tensor must not report its inner meta
        if func is _DEVICE:
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
                self._record_storage(tensor)
        call = self._interceptor.intercept(operation.function, operation.args)
        if call is not None:
            numbers = tuple(self.number_of(tensor) for tensor in operation.inputs)
            self.communication.append(RecordedCommunication(self.now, call, numbers))

    def begin_activity(self, activity: object) -> None:
        """Record the start of an activity of the rank."""
        self.now += 1  # a release before the first operation of the activity belongs to it
        self.activities.append(ActivityStart(self.now, activity))

    def _record_storage(self, tensor: Tensor) -> None:
        """Record the storage of a tensor if it is new or has another size."""
        num_bytes = tensor.untyped_storage().nbytes()
        number = self._storages.find(tensor)
        if number is None:
            self._begin_life(self._storages.add(tensor), num_bytes)
        elif self._current[number].num_bytes != num_bytes:
            self._resize(number, num_bytes, self.now)

    def _begin_life(self, number: int, num_bytes: int) -> None:
        self._current[number] = life = StorageLife(number, num_bytes, self.now, self.now)
        self.lives.append(life)

    def _end_life(self, number: int) -> None:
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
        """Return the number of a tensor's storage;
        a storage not recorded before is recorded now.
        """
        number = self._storages.find(tensor)
        if number is None:
            number = self._storages.add(tensor)
            self._begin_life(number, tensor.untyped_storage().nbytes())
        return number

    def note_host(self, memory: Tensor) -> None:
        """Record that a tensor's storage is host memory."""
        self.on_host.add(self.number_of(memory))

    def numbers_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of all tensors whose storage is recorded."""
        return {number for number in map(self._storages.find, tensors) if number is not None}

    @contextmanager
    def recording_resizes(self) -> Iterator[None]:
        """Record manual storage resizes inside the context.

        They are not dispatched operations; torch's fully_shard frees memory by them.
        """
        storage_class: Any = torch.UntypedStorage
        resize = storage_class.resize_

        def recording_resize(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            number = self._storages.find_storage(storage)
            if number is not None and self._current[number].num_bytes != size:
                self._resize(number, size, self.now + 1)
            return result

        storage_class.resize_ = recording_resize
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
    return list(accumulate(changes[:-1]))
