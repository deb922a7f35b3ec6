"""Record of uninitialised memory on the CPU while a builder runs with its parameters on the meta device.

A dispatch mode sees which operations leave memory uninitialised, and which overwrite all of it. What is left is filled
with a pattern of unwritten.py. Large memory is filled only in a second run of the builder, and only of sizes that were
left over in the first one: most large tensors are parameters, which move to meta before their memory is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.model.unwritten import EMPTY, MARKED, MARKS, OVERWRITES, RESIZES, FreshMemory, Pattern

MARKED_UP_TO = 2**22
"""Elements of uninitialised memory that are always marked, where the dtype has a mark."""


class _Unwritten(NamedTuple):
    """Storage with memory that was uninitialised. The weak reference keeps its number from being used again."""

    storage: StorageWeakRef
    dtype: torch.dtype
    num_bytes: int
    is_filled: bool

    def exists(self) -> bool:
        """Return whether some tensor holds the storage."""
        return not self.storage.expired()  # type: ignore[no-untyped-call]


class MemoryRecord:
    """Storages with uninitialised memory that no operation has overwritten as a whole.

    Args:
        pattern: bits for the memory.
        sizes: bytes of large storages that get them too.
    """

    def __init__(self, pattern: Pattern = MARKED, sizes: Collection[int] = ()) -> None:
        self._pattern, self._sizes = pattern, sizes
        self._unwritten: dict[int, _Unwritten] = {}
        self._read: list[_Unwritten] = []
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing that operations read or overwrite in the block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def add(self, memory: FreshMemory) -> None:
        """Record memory that an operation has left uninitialised, and fill it."""
        storage, dtype = memory.storage, memory.dtype
        num_bytes = storage.nbytes()
        is_large = dtype in MARKS and num_bytes > MARKED_UP_TO * dtype.itemsize
        is_filled = not is_large or num_bytes in self._sizes
        if is_filled:
            memory.fill(self._pattern)
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._unwritten[storage._cdata] = _Unwritten(weak, dtype, num_bytes, is_filled)

    def follow(self, func: Any, given: Iterable[Tensor], written: Collection[Tensor]) -> None:
        """Record what an operation overwrites as a whole, and what it reads.

        Args:
            func: the operation.
            given: its tensors.
            written: those of them that it writes to.
        """
        name = func._schema.name.removeprefix("aten::")
        if self._is_paused or not self._unwritten or func.is_view or name in EMPTY | RESIZES:
            return
        is_writing_all = name in OVERWRITES or func._overloadname == "out"
        for tensor in given:
            if tensor.layout is not torch.strided:
                continue
            if not any(tensor is each for each in written):
                self.read(tensor)
            elif is_writing_all and _is_whole(tensor):
                self._unwritten.pop(tensor.untyped_storage()._cdata, None)

    def read(self, tensor: Tensor) -> None:
        """Record that something depends on the values of a tensor."""
        unwritten = self._unwritten.get(tensor.untyped_storage()._cdata)
        if unwritten is not None:
            self._read.append(unwritten)

    def unfilled_sizes(self) -> frozenset[int]:
        """Return the bytes of large storages without a pattern that still exist, or that an operation has read."""
        existing = [each for each in self._unwritten.values() if each.exists()]
        return frozenset(each.num_bytes for each in [*existing, *self._read] if not each.is_filled)

    def is_undecided(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether some of these tensors may have, or depend on, unwritten elements that hold no mark."""
        if self._read:
            return True
        for tensor in tensors:
            unwritten = self._unwritten.get(tensor.untyped_storage()._cdata)
            if unwritten is not None and (unwritten.dtype not in MARKS or unwritten.dtype != tensor.dtype):
                return True
        return False


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor has all elements of its storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
