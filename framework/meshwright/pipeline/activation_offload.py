"""Activation offload: tensors saved for backward are in host memory between a layer's forward
and its backward.

    compute    F a | F b   | F c   | ...  other micro-batches  ... | B c   | B b   | B a
    out            | a out | b out |                                                        device to host
    in                                                     | c in  | b in  | a in  |        host to device

A group is what one layer saves for one micro-batch. Its copy to the host begins when the layer's
forward ends, and its device memory is released when the next group is complete. In backward each
group is prefetched while the group after it is in use. The first group of a backward is prefetched
during the preceding computation of the schedule. The last group of a forward stays on the device if
its own backward comes next.

A storage is copied as a whole, once for all views of it. On CPU the copies are synchronous. No
numbers change.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.config import Pipeline
from meshwright.model.meter import StorageRegistry
from meshwright.pipeline.offload_copies import HostCopies, StoredActivation
from meshwright.pipeline.pointwise import Hooks
from meshwright.schedule.action import Action, Kind, Schedule

SMALLEST = 1024
"""Minimum size of a storage that is copied, in bytes."""


class _Group:
    """Storages that one layer has saved for one micro-batch.
    Only autograd's graph keeps them alive.
    """

    def __init__(self, previous: _Group | None) -> None:
        self.previous = previous
        """Group of the preceding layer, whose backward follows."""
        self._members: dict[int, weakref.ref[StoredActivation]] = {}

    def add(self, stored: StoredActivation) -> None:
        """Add a storage, which may be in an earlier group too."""
        self._members[id(stored)] = weakref.ref(stored)

    @property
    def members(self) -> list[StoredActivation]:
        """Storages that autograd still needs."""
        return [stored for member in self._members.values() if (stored := member()) is not None]


class _Slot(NamedTuple):
    """Record of an offloaded tensor in autograd's graph: its view of a storage,
    which ``offload`` copies back.
    """

    offload: ActivationOffload
    group: _Group
    stored: StoredActivation
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Resident(NamedTuple):
    """A saved tensor that stays on the device, with its version; None for parameters,
    whose storage may change.
    """

    tensor: Tensor
    version: int | None


class ActivationOffload:
    """Offload of the tensors that the stages of one rank save for backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.copies = HostCopies(device)
        self._following: dict[tuple[bool, int, int], tuple[int, int]] = {}
        """(is backward, stage, micro-batch) -> (stage, micro-batch)
        of the backward that follows it on this rank.
        """
        self._groups: dict[tuple[int, int], _Group] = {}
        """(stage, micro-batch) -> last group of its forward."""
        self._packing: _Group | None = None
        """Group of the layer whose forward is running."""
        self._pending: tuple[tuple[int, int], _Group] | None = None
        """Last group of the last forward, not copied yet, and its (stage, micro-batch)."""
        self._leaving: _Group | None = None
        """Group whose copy to the host was posted last."""
        self._entered: _Group | None = None
        """Group that the running backward uses."""
        self._begun: tuple[int, int] = 0, 0
        self._next: tuple[int, int] | None = None

    def set_schedule(self, schedule: Schedule, pp_rank: int) -> None:
        """Store which backward follows each computation of this rank, for prefetches."""
        row = [
            action
            for _, action in schedule.actions(pp_rank)
            if action.kind in (Kind.F, Kind.B, Kind.I)
        ]
        pairs = pairwise(row)
        self._following = {
            _key(each): _place(after) for each, after in pairs if after.kind is not Kind.F
        }

    # -------------------------------------------------------------------------------------------------------
    # forward

    def begin_forward(self, stage: int, microbatch: int, held: Collection[Tensor]) -> None:
        """Begin a training forward. ``held``: tensors that stay on the device anyway,
        and are not copied.
        """
        self._copy_pending()
        self._begun = (stage, microbatch)
        self._next = self._following.get((False, stage, microbatch))
        self._held = {tensor.untyped_storage()._cdata: tensor for tensor in held}
        self._storages = StorageRegistry(lambda number: None)
        self._known: weakref.WeakValueDictionary[int, StoredActivation] = (
            weakref.WeakValueDictionary()
        )

    @contextmanager
    def around_layer(self, *, is_last: bool) -> Iterator[None]:
        """Enter a context for a layer's forward, whose saved tensors are offloaded.

        Args:
            is_last: no later layer of this stage is offloaded.
        """
        self._packing = group = _Group(self._groups.get(self._begun))
        if is_last and self._next is not None:
            self._prefetch(self._groups.get(self._next))
        try:
            with saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            self._packing = None
        self._settle()
        self._groups[self._begun] = group
        if is_last:
            self._pending = self._begun, group
        else:
            self._copy_out(group)

    def hooks(self) -> Hooks | None:
        """Return the saved-tensor hooks of the layer whose forward is running;
        None if it is not offloaded.
        """
        return None if self._packing is None else (self.pack, unpack)

    def pack(self, tensor: Tensor) -> _Slot | _Resident:
        """Return the record of a saved tensor of any shape. Copies nothing yet."""
        assert self._packing is not None
        if is_weight(tensor) or not self._is_offloaded(tensor):
            resident = tensor if tensor.is_leaf else tensor.detach()
            return _Resident(resident, None if is_weight(tensor) else tensor._version)
        # an output refers to its own node: a reference cycle would keep the graph alive
        tensor = tensor.detach()
        number = self._storages.find(tensor)
        number = self._storages.add(tensor) if number is None else number
        stored = self._known.get(number)
        if stored is None or stored.is_stale or stored.version != tensor._version:
            length = tensor.untyped_storage().nbytes() // tensor.itemsize
            self._known[number] = stored = StoredActivation(tensor.as_strided((length,), (1,), 0))
        self._packing.add(stored)
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        return _Slot(self, self._packing, stored, *place)

    def _is_offloaded(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self._device.type
            and tensor.untyped_storage()._cdata not in self._held
            and is_large(tensor)
        )

    # ------------------------------------------------------------------------------------------------------
    # backward

    def begin_backward(self, stage: int, microbatch: int) -> None:
        """Begin a backward. The last group of its forward is still on the device
        if no computation came between.
        """
        if self._pending is not None and self._pending[0] == (stage, microbatch):
            self._pending = None
        self._copy_pending()
        self._begun = (stage, microbatch)
        self._next = self._following.get((True, stage, microbatch))
        self._entered = None

    def end_backward(self) -> None:
        """End a backward: forget its groups."""
        self._settle()
        self._groups.pop(self._begun, None)
        self._entered = None

    def take(self, slot: _Slot) -> Tensor:
        """Return a saved tensor on the device. The current stream waits for its copy,
        the host does not.
        """
        stored = slot.stored
        if self._entered is not slot.group:
            self._enter(slot.group)
        if stored.device is None or stored.arrived is not None:
            self._return([stored])
        flat = stored.device
        if (
            stored.is_stale
            or flat is None
            or (stored.host is None and flat._version != stored.version)
        ):
            raise RuntimeError(_overwritten(slot.size))
        flat = flat if flat.dtype == slot.dtype else flat.view(slot.dtype)
        return flat.as_strided(slot.size, slot.stride, slot.offset)

    def _enter(self, group: _Group) -> None:
        """Copy a group back to the device, and prefetch the next one."""
        if self._entered is not None:
            self._settle()
        self._entered = group
        self._return(group.members)
        if group.previous is not None:
            self._prefetch(group.previous)
        elif self._next is not None:
            self._prefetch(self._groups.get(self._next))

    def _return(self, members: list[StoredActivation]) -> None:
        self.copies.post_in(members)
        self.copies.finish_in(members)

    def _prefetch(self, group: _Group | None) -> None:
        if group is not None and group is not self._leaving:
            self.copies.post_in(group.members)

    # --------------------------------------------------------------------------------------------------------
    # copies

    def _copy_pending(self) -> None:
        if self._pending is not None:
            self._settle()
            self._copy_out(self._pending[1])
            self._pending = None

    def _copy_out(self, group: _Group) -> None:
        self.copies.post_out(group.members)
        self._leaving = group

    def _settle(self) -> None:
        """Release the device memory of the group that was copied last."""
        if self._leaving is not None:
            self.copies.finish_out(self._leaving.members)
            self._leaving = None


def unpack(slot: _Slot | _Resident) -> Tensor:
    """Return a saved tensor, on the device and in the shape it was saved in."""
    if isinstance(slot, _Slot):
        return slot.offload.take(slot)
    if slot.version not in (None, slot.tensor._version):
        raise RuntimeError(_overwritten(slot.tensor.shape))
    return slot.tensor


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def is_large(tensor: Tensor) -> bool:
    """Return whether a tensor's storage can be copied and is worth it."""
    is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and tensor.untyped_storage().nbytes() >= SMALLEST


def activation_offload(pipeline: Pipeline, device: torch.device) -> ActivationOffload | None:
    """Return the offload of a rank's saved tensors; None: they stay on the device."""
    return ActivationOffload(device) if pipeline.offload_activations else None


def _overwritten(shape: torch.Size) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace"
        f" operation: a tensor {tuple(shape)} that pipeline.offload_activations covers"
    )


def _place(action: Action) -> tuple[int, int]:
    assert action.stage is not None and action.microbatch is not None
    return action.stage, action.microbatch


def _key(action: Action) -> tuple[bool, int, int]:
    return (action.kind is not Kind.F, *_place(action))
