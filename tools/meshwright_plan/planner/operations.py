"""Recorder of the work and the live bytes of a computation that runs on the meta device.

    op          FLOPs   bytes   storages read and written        -> Work: kinds of operations, to be timed on a device
    storages    created by an operation, freed with their last reference  -> live and peak bytes

Operations that are not products are counted one by one (``fused = False``, eager torch). Where a
compiler or hand-written kernels fuse them, a group counts as one operation that reads its inputs
and writes its outputs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.mesh.fake import CountingGroup
from meshwright.model.meter import Operation, OperationRecorder, StorageRegistry, stored_bytes

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
GATHERS = {
    aten.embedding,
    aten.index_select,
    aten.gather,
    aten.index,
    aten.embedding_dense_backward,
    aten.index_put_,
}


class WorkKind(StrEnum):
    """Kind of an operation, by the formula that times it."""

    PRODUCT = "product"
    """A matrix product."""
    ATTENTION = "attention"
    """The fused attention kernel."""
    FLOAT8 = "float8 product"
    """A matrix product of two float8 tensors with a scale per row."""
    EMULATION = "emulation"
    """Conversion of the factors of a float8 product,
    which a device with such a kernel does not need.
    """
    MEMORY = "memory"
    """All other operations, limited by memory bandwidth."""


class Work(NamedTuple):
    """A group of equal operations."""

    kind: WorkKind
    flops: float
    """FLOPs computed by one of them (causal attention: half of the full matrix)."""
    bytes: float
    """Bytes read and written by one of them."""
    shape: tuple[int, int, int, int] = (1, 0, 0, 0)
    """(batch, m, n, k) of a product; for attention (samples times heads, queries, keys,
    head dim).
    """
    times: int = 1
    groups: int = 1
    """Number of products in one grouped product (``aten._grouped_mm``), which is its batch."""


@dataclass
class RecordedOp:
    """One recorded operation."""

    kind: WorkKind
    flops: float
    bytes: float
    shape: tuple[int, int, int, int] = (1, 0, 0, 0)
    reads: dict[int, float] = field(default_factory=dict)
    """Bytes read, by storage number."""
    writes: dict[int, float] = field(default_factory=dict)
    fusable: bool = False
    times: int = 1
    """Number of equal operations that this record represents."""
    copies: bool = False
    """True if the operation only copies its input into another memory layout."""
    groups: int = 1
    """Products of a grouped product."""


class WorkRecorder(OperationRecorder):  # type: ignore[no-untyped-call]
    """Context that records operations. Only storages created inside it count as live."""

    def __init__(self, group: CountingGroup) -> None:
        """Create an empty recorder; ``group.repeats`` is the number of loop passes
        that a recorded pass stands for.
        """
        super().__init__()
        self.group = group
        self.ops: list[RecordedOp] = []
        self.attended: list[tuple[int, int]] = []
        self.accumulated: tuple[set[tuple[int, ...]], set[int]] = set(), set()
        """Products of these weight shapes over these numbers of tokens need no new memory:
        they accumulate in place.
        """
        self.live = 0
        self.peak = 0
        self.watched = 0
        self.peak_unwatched = 0
        """Peak live bytes without watched storages."""
        self._watched_numbers: set[int] = set()
        self._conversions: dict[int, list[RecordedOp]] = {}
        """Storages with values that were converted from float8,
        and the operations of the conversion.
        """
        self._sizes: dict[int, int] = {}
        reference = weakref.ref(self)

        def release(number: int) -> None:
            recorder = reference()
            if recorder is not None:
                recorder._release(number)

        self._storages = StorageRegistry(release)

    def restart_peak(self) -> None:
        """Restart peak tracking at the current live bytes."""
        self.peak = self.live
        self.peak_unwatched = self.live - self.watched

    def watch(self, tensor: Tensor) -> None:
        """Exclude the tensor's storage from ``peak_unwatched``, because it is counted elsewhere."""
        self._watched_numbers.add(self.number_of(tensor))
        self.watched += tensor.untyped_storage().nbytes()

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage: shared by views,
        not reused for a later storage at its address.
        """
        number = self._storages.find(tensor)
        return self._add(tensor, 0) if number is None else number

    def _add(self, tensor: Tensor, size: int) -> int:
        """Register a storage that counts as ``size`` live bytes; return its number."""
        number = self._storages.add(tensor)
        self._sizes[number] = size
        self.live += size
        return number

    def _release(self, number: int) -> None:
        size = self._sizes.pop(number)
        self.live -= size
        if number in self._watched_numbers:
            self.watched -= size

    def alive(self) -> set[int]:
        """Return the numbers of the storages that still exist."""
        return self._storages.numbers()

    def add(
        self,
        flops: float,
        num_bytes: float,
        done_share: float = 1.0,
        shape: tuple[int, int, int, int] = (1, 0, 0, 0),
    ) -> None:
        """Record the fused attention kernel (see
        :class:`meshwright.model.meter.FusedAttentionMode`).
        """
        self.ops.append(RecordedOp(WorkKind.ATTENTION, flops * done_share, num_bytes, shape))

    def record(self, operation: Operation) -> None:
        """Record an operation that has run, and the live bytes after it."""
        packet, inputs = operation.packet, operation.inputs
        reads = {self.number_of(tensor): stored_bytes(tensor) for tensor in inputs}
        writes: dict[int, float] = {}
        for tensor in operation.outputs:
            number = self._storages.find(tensor)
            if number is None:
                inner = inputs[0].shape[-1] if inputs and inputs[0].dim() == 2 else 0
                is_added = (
                    packet is aten.mm
                    and inner in self.accumulated[1]
                    and tuple(tensor.shape) in self.accumulated[0]
                )
                size = 0 if is_added else tensor.untyped_storage().nbytes()
                writes[self._add(tensor, size)] = stored_bytes(tensor)
            elif operation.function._schema.is_mutable:
                writes[number] = stored_bytes(tensor)
        self.peak = max(self.peak, self.live)
        self.peak_unwatched = max(self.peak_unwatched, self.live - self.watched)
        flops, num_bytes = operation.flops, operation.num_bytes
        if flops or num_bytes:
            product = flops > 0
            op = RecordedOp(
                WorkKind.PRODUCT if product else WorkKind.MEMORY,
                flops,
                num_bytes,
                _shape(packet, operation.args, flops) if product else (1, 0, 0, 0),
                reads,
                writes,
                not product and packet not in GATHERS,
                copies=packet is aten.clone,
                times=self.group.repeats,
            )
            if packet is aten._grouped_mm:
                op.groups = op.shape[0]
            self.ops.append(op)
            self._follow_float8(op, inputs)

    def _follow_float8(self, op: RecordedOp, inputs: Iterable[Tensor]) -> None:
        """Find products of two converted float8 tensors:
        the emulation of :mod:`meshwright.fp8.products`.
        """
        converted = [
            self._conversions[number] for number in op.reads if number in self._conversions
        ]
        if op.kind is WorkKind.PRODUCT:
            if len(converted) == len(op.reads) == 2:
                op.kind = WorkKind.FLOAT8
                for conversion in chain.from_iterable(converted):
                    conversion.kind, conversion.fusable = WorkKind.EMULATION, False
        elif converted or any(tensor.dtype == torch.float8_e4m3fn for tensor in inputs):
            for number in op.writes:
                self._conversions[number] = [*chain.from_iterable(converted), op]

    def work(self, start: int, stop: int, *, fused: bool, any_order: bool) -> tuple[Work, ...]:
        """Count the operations ``start`` to ``stop`` (exclusive), grouped by kind, FLOPs,
        bytes and shape.
        """
        ops: Iterable[RecordedOp] = _fuse(self.ops, start, stop) if fused else self.ops[start:stop]
        if any_order:
            ops = [op for op in ops if not op.copies]
        counted: Counter[Work] = Counter()
        for op in ops:
            counted[Work(op.kind, op.flops, op.bytes, op.shape, groups=op.groups)] += op.times
        return tuple(work._replace(times=times) for work, times in counted.items())


def _shape(packet: Any, args: Any, flops: float) -> tuple[int, int, int, int]:
    """Return (batch, m, n, k) of a product;
    any other operation becomes a square product with the same FLOPs.
    """
    # by groups of rows, of equal size: a (R, k) by b (E, k, n), or a (m, R) by b (R, n)
    if packet is aten._grouped_mm:
        (rows, k), num_groups, n = args[0].shape, args[2].numel(), args[1].shape[-1]
        of_rows = args[1].dim() == 3
        return (
            num_groups,
            rows // num_groups if of_rows else rows,
            n,
            k if of_rows else k // num_groups,
        )
    if packet in PRODUCTS:
        a, b = [arg for arg in args if isinstance(arg, Tensor)][-2:]
        batch = a.shape[0] if a.dim() == 3 else 1
        return batch, a.shape[-2], b.shape[-1], a.shape[-1]
    side = max(1, round((flops / 2) ** (1 / 3)))
    return 1, side, side, side


def _fuse(ops: list[RecordedOp], start: int, stop: int) -> Iterator[RecordedOp]:
    """Group neighbouring operations that consume each other's results;
    intermediates within a group cost no bytes.
    """
    used_later: dict[int, int] = {}
    for position, op in enumerate(ops):
        for number in op.reads:
            used_later[number] = position
    group: list[RecordedOp] = []
    for position in range(start, stop):
        op = ops[position]
        made = {number for member in group for number in member.writes}
        if op.fusable and group and made & op.reads.keys() and op.times == group[0].times:
            group.append(op)
            continue
        if group:
            yield _merge(group, position, used_later)
            group = []
        if op.fusable:
            group = [op]
        else:
            yield op
    if group:
        yield _merge(group, stop, used_later)


def _merge(group: list[RecordedOp], end: int, used_later: dict[int, int]) -> RecordedOp:
    if len(group) == 1:
        return group[0]
    made: dict[int, float] = {}
    read: dict[int, float] = {}
    for op in group:
        for number, size in op.reads.items():
            if number not in made:
                read[number] = max(read.get(number, 0.0), size)
        for number, size in op.writes.items():
            made[number] = max(made.get(number, 0.0), size)
    out = sum(size for number, size in made.items() if used_later.get(number, -1) >= end)
    last = max(group[-1].writes.values(), default=0.0)
    return RecordedOp(
        WorkKind.MEMORY, 0.0, sum(read.values()) + max(out, last), times=group[0].times
    )
