"""Counts what autograd keeps between forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.model.meter import Operation, OperationRecorder, StorageRegistry
from meshwright_models import rotary


class Kept:
    """Stands for a tensor in autograd's graph; gone when the graph lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class KeptBytes:
    """Enter ``watching()`` around forwards; ``bytes()`` is what they keep now: each storage once.

    Parameters do not count, nor the rotary table that all blocks of a process share.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._not_ours = {
            p.untyped_storage().data_ptr() for model in models for p in model.parameters()
        }
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def watching(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        if tensor.untyped_storage().data_ptr() not in self._not_ours:
            self._kept.add(kept)
        return kept

    def bytes(self) -> int:
        storages = [kept.tensor.untyped_storage() for kept in self._kept]
        tables = {table.untyped_storage().data_ptr() for table in rotary._TABLES.values()}
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for place, size in sizes.items() if place not in tables)


class MadeBytes(OperationRecorder):
    """Enter it around forwards; ``bytes()`` is what still lives of what they made,
    each storage once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._storages = StorageRegistry(lambda number: None)

    def record(self, operation: Operation) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in operation.inputs}
        for tensor in operation.outputs:
            if self._storages.find(tensor) is None and tensor.untyped_storage()._cdata not in given:
                self._sizes[self._storages.add(tensor)] = tensor.untyped_storage().nbytes()

    def bytes(self) -> int:
        return sum(self._sizes[number] for number in self._storages.numbers())
