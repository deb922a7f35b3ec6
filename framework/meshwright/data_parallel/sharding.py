"""Interface to a stage's parameters on one replica, the same for ZeRO-0 to ZeRO-3."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.mesh.holders import Holders
from meshwright.parameters import GroupSettings, ParameterInfo


class BucketKind(NamedTuple):
    """Properties that parameters of a bucket share. ``is_eight_bit``: 8-bit optimizer state;
    ``is_matrix``:
    stepped as matrices.
    """

    holders: Holders
    decays: bool
    is_eight_bit: bool
    settings: GroupSettings = GroupSettings()
    is_matrix: bool = False


class StageParameter(NamedTuple):
    """One parameter of this rank's stage, its layer and its holders."""

    info: ParameterInfo
    parameter: nn.Parameter
    layer: str
    """Name of the element of the Sequential that uses the parameter (the first,
    when several do).
    """
    holders: Holders = Holders()

    @property
    def kind(self) -> BucketKind:
        """Bucket kind. Only parameters of the same kind share a bucket."""
        info = self.info
        return BucketKind(
            holders=self.holders,
            decays=info.decays,
            is_eight_bit=info.is_eight_bit,
            settings=info.settings,
            is_matrix=info.matrix is not None,
        )


class BucketSlot(NamedTuple):
    """Range [start, stop) of a parameter in its flat bucket, in elements."""

    member: StageParameter
    start: int
    stop: int


class SlotPart(NamedTuple):
    """Elements [start, stop) of a flat tensor, all of one parameter."""

    slot: BucketSlot
    start: int
    stop: int

    @property
    def position(self) -> int:
        """Position of the first element in the parameter's flattened slice, padding included."""
        return self.start - self.slot.start


def slot_parts(slots: Iterable[BucketSlot], start: int, stop: int) -> Iterator[SlotPart]:
    """Yield the parts of the parameters that lie in [start, stop) of their flat tensor."""
    for slot in slots:
        low, high = max(slot.start, start), min(slot.stop, stop)
        if low < high:
            yield SlotPart(slot, low, high)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are summed: float64 for float64 parameters,
    float32 for all others.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


class ShardedParameters(ABC):
    """Flat parameters of one kind; this replica's optimizer steps one shard of them.

    Base class of the buckets of ZeRO-0 to ZeRO-2 (:class:`~.buckets.Bucket`) and ZeRO-3
    (:class:`~.fully_sharded.RowShards`). n = ranks of the shard group.
    """

    flat: Tensor | None = None
    """Full flat weights (numel,), in the training dtype; None under ZeRO-3,
    where no rank keeps them.
    """
    flat_gradient: Tensor | None = None
    """This rank's full gradient (numel,); once reduced, only ``shard_range`` is valid.
    None while there is none.
    """
    keeps_gradient: bool = False
    """True when this rank keeps its full (unsharded) gradient from one step to the next."""
    master: Tensor
    """Master weights (numel/n,) that the optimizer steps: this rank's shard,
    in the dtype of the gradient.
    """
    shard_gradient: Tensor
    """This rank's shard (numel/n,) of the reduced gradient. Never rebound:
    the optimizer holds this tensor.
    """

    def __init__(
        self,
        slots: Sequence[BucketSlot],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Describe the bucket; subclasses allocate ``master`` and ``shard_gradient``.

        Args:
            numel: elements of the full flat tensor, padding included.
            dtype: dtype of the weights in the forward pass.
            device: device of the computation and of the collectives.
        """
        self.slots = list(slots)
        self.kind = slots[0].member.kind
        self.holders = self.kind.holders
        self.numel = numel
        self.dtype = dtype
        self.device = device
        self.is_sharded = self.holders.shard_group.size > 1
        self.shard_range = self.holders.range_of(numel)
        self.pending: CollectiveHandle | None = None
        """Collective that was posted last and has not been awaited. One alone:
        wait before the next is posted.
        """

    @property
    def is_mixed_precision(self) -> bool:
        """True when the master weights have more bits than the weights,
        which are rounded copies of them.
        """
        return self.master.dtype != self.dtype

    @abstractmethod
    def begin_step(self) -> None:
        """Begin a new sum of gradients."""

    @abstractmethod
    def leaf(self, slot: BucketSlot) -> Tensor:
        """Return the tensor that autograd uses as the parameter."""

    @abstractmethod
    def gradient_of(self, slot: BucketSlot) -> Tensor:
        """Return one parameter's gradient in the parameter's shape,
        as accumulated on this rank before reduction.
        """

    def fetch_gradient(self) -> Tensor:
        """Return this rank's gradient shard (numel/n,) on the master weights' device.
        Blocks until complete.
        """
        return self.shard_gradient

    @abstractmethod
    def gather(self) -> None:
        """Post the all-gather of the updated weights over the shard group,
        after the optimizer step. Does not block.

        Bytes on the wire per rank: M (n-1)/n, M = bytes of the full flat weights.
        """

    def sum_shard(self, group: Group) -> None:
        """Post an all-reduce (sum) of this rank's gradient shard over ``group``. Does not block.

        Bytes on the wire per rank: 2 m (r-1)/r, m = bytes of the shard, r = ranks of the group.
        """
        self.pending = group.all_reduce(self.shard_gradient)

    def wait(self) -> None:
        """Block until the collective that was posted last for this bucket is done."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


def sum_partial(buckets: Sequence[ShardedParameters]) -> None:
    """All-reduce over tp the gradients of parameters that each tp rank used for only some tokens
    or heads. Blocks.

    It runs after the reductions over the replicas, and waits for those still in flight. Only this
    rank's shard of each bucket is sent: 2 m (tp-1)/tp bytes per rank, m = bytes of the shard.
    """
    for bucket in buckets:
        bucket.wait()  # the sum reads what the reductions over the replicas write
        for group in bucket.holders.partial_over:
            bucket.sum_shard(group)
    for bucket in buckets:  # all are in flight by now
        bucket.wait()
