"""Interface to a stage's parameters on one replica, the same for ZeRO-0 to ZeRO-3.

4 replicas, shard_factor = 2  replicas 0 1 | 2 3      neighbours are a shard group: together one full copy (HSDP);
                              shard    0 1 | 0 1      equal shards are a copies group, which sums gradients: 0 2, 1 3
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.parameters import GroupSettings, ParameterInfo


class Sharding(NamedTuple):
    """Process groups of n replicas. Sizes: ZeRO-0 (shard 1, copies n), ZeRO-1 to 3 (shard_factor, n / shard_factor)."""

    shard: Group
    """Replicas that hold one shard each of a bucket. With one rank, a bucket is not sharded."""
    copies: Group
    """Replicas that hold the same shard, one from each ``shard`` group. With one rank, no other replica holds it."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas: dp x cp; of experts dp x cp x tp / ep."""
        return self.shard.size * self.copies.size

    @property
    def is_first(self) -> bool:
        """True on the first replica, which saves and reports the state that all of them hold."""
        return self.shard.rank == 0 and self.copies.rank == 0

    def range_of(self, numel: int) -> tuple[int, int]:
        """Return this rank's [start, stop) in a flat tensor of ``numel`` elements; shards divide ``numel`` evenly."""
        per_shard = numel // self.shard.size
        return self.shard.rank * per_shard, (self.shard.rank + 1) * per_shard


class Tie(NamedTuple):
    """Membership of a stage's parameter in a weight that is tied across stages."""

    name: str
    """Canonical name, the same for all copies."""
    ranks: Group
    """Group of the ranks that hold a copy, this rank included. It has one rank when all copies are on this rank."""
    is_first: bool
    """True for the copy on the first stage that holds the weight. Only this copy is counted in norms and saved."""


class BucketKind(NamedTuple):
    """Properties that parameters of a bucket share. ``is_eight_bit``: 8-bit optimizer state; ``is_matrix``: Muon."""

    decays: bool
    is_eight_bit: bool
    replicated_over_tp: bool
    sum_over_tp: bool
    tied: Tie | None
    settings: GroupSettings = GroupSettings()
    is_matrix: bool = False
    is_expert: bool = False
    """True for the weights of experts that are split over ep: their replicas are the ranks with the same experts."""

    def owns(self, tp_rank: int) -> bool:
        """Return whether this tp rank counts the bucket in gradient norms and parameter numbers.

        It selects among tp ranks and tied stages; ``make_optimizer`` selects among the replicas with the same shard.
        """
        return (not self.replicated_over_tp or tp_rank == 0) and (self.tied is None or self.tied.is_first)


class StageParameter(NamedTuple):
    """One parameter of this rank's stage, its layer and its tie."""

    info: ParameterInfo
    parameter: nn.Parameter
    layer: str
    """Name of the element of the Sequential that uses the parameter (the first, when several do)."""
    tied: Tie | None = None
    """Tie to the copies on other stages; None for a weight that is not tied."""

    @property
    def kind(self) -> BucketKind:
        """Bucket kind. Only parameters of the same kind share a bucket."""
        info = self.info
        whole, is_matrix = info.slice is None, info.matrix is not None
        shared = whole, info.sum_over_tp, self.tied
        return BucketKind(info.decays, info.is_eight_bit, *shared, info.settings, is_matrix, info.is_expert)


class BucketSlot(NamedTuple):
    """Range [start, stop) of a parameter in its flat bucket, in elements."""

    member: StageParameter
    start: int
    stop: int


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are summed: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ShardedParameters(ABC):
    """Flat parameters of one kind; this replica's optimizer steps one shard of them.

    Base class of the buckets of ZeRO-0 to ZeRO-2 (:class:`~.buckets.Bucket`) and ZeRO-3
    (:class:`~.fully_sharded.RowShards`). n = ranks of the shard group.
    """

    flat: Tensor | None = None
    """Full flat weights (numel,), in the training dtype; None under ZeRO-3, where no rank keeps them."""
    flat_gradient: Tensor | None = None
    """This rank's full gradient (numel,); once reduced, only ``shard_range`` is valid. None while there is none."""
    keeps_gradient: bool = False
    """True when this rank keeps its full (unsharded) gradient from one step to the next."""
    master: Tensor
    """Master weights (numel/n,) that the optimizer steps: this rank's shard, in the dtype of the gradient."""
    shard_gradient: Tensor
    """This rank's shard (numel/n,) of the reduced gradient. Never rebound: the optimizer holds this tensor."""

    def __init__(
        self, slots: Sequence[BucketSlot], sharding: Sharding, numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Describe the bucket; subclasses allocate ``master`` and ``shard_gradient``.

        Args:
            numel: elements of the full flat tensor, padding included.
            dtype: dtype of the weights in the forward pass.
            device: device of the computation and of the collectives.
        """
        self.slots = list(slots)
        self.kind = slots[0].member.kind
        self.sharding = sharding
        self.numel = numel
        self.dtype = dtype
        self.device = device
        self.is_sharded = sharding.shard.size > 1
        self.shard_range = sharding.range_of(numel)
        self.pending: CollectiveHandle | None = None
        """Collective that was posted last and has not been awaited. One alone: wait before the next is posted."""

    @property
    def is_mixed_precision(self) -> bool:
        """True when the master weights have more bits than the weights, which are rounded copies of them."""
        return self.master.dtype != self.dtype

    @abstractmethod
    def begin_step(self) -> None:
        """Discard the gradients of the previous step."""

    @abstractmethod
    def leaf(self, slot: BucketSlot) -> Tensor:
        """Return the tensor that autograd uses as the parameter."""

    @abstractmethod
    def gradient_of(self, slot: BucketSlot) -> Tensor:
        """Return one parameter's gradient in the parameter's shape, as accumulated on this rank before reduction."""

    def fetch_gradient(self) -> Tensor:
        """Return this rank's gradient shard (numel/n,) on the master weights' device. Blocks until complete."""
        return self.shard_gradient

    @abstractmethod
    def gather(self) -> None:
        """Post the all-gather of the updated weights over the shard group, after the optimizer step. Does not block.

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


def sum_over_tp(buckets: Sequence[ShardedParameters], tp: Group) -> None:
    """All-reduce over tp the gradients of parameters that each tp rank used for only some tokens or heads. Blocks.

    It runs after the reductions over the replicas, and waits for those still in flight. Only this rank's shard of each
    bucket is sent: 2 m (tp-1)/tp bytes per rank, m = bytes of the shard.
    """
    for bucket in buckets:
        bucket.wait()
        if bucket.kind.sum_over_tp:
            bucket.sum_shard(tp)
    for bucket in buckets:
        bucket.wait()
