"""What the rest of the framework knows of a stage's parameters on one replica, however they are kept: whose they are,
what makes some of them alike, and the shard of them that this replica's optimizer steps.

    dp = 4, shard_factor = 2      replicas 0 1 | 2 3      shards are cut inside a group of neighbours,
                                  shard    0 1 | 0 1      and summed across: 0 with 2, 1 with 3
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.mesh.comm import Group, Handle
from meshwright.parameters import ParameterInfo


class Sharding(NamedTuple):
    """How the replicas share the work of the optimizer."""

    shard: Group
    """The replicas among whom a bucket is cut, one shard each; of one rank: it is whole everywhere."""
    copies: Group
    """The replicas that hold the same shard, one of each such group; of one rank: nobody else does."""

    @property
    def num_replicas(self) -> int:
        """dp."""
        return self.shard.size * self.copies.size

    def range_of(self, numel: int) -> tuple[int, int]:
        """My elements of so many, which the shards divide."""
        per_shard = numel // self.shard.size
        return self.shard.rank * per_shard, (self.shard.rank + 1) * per_shard


class Tie(NamedTuple):
    """What a copy of a weight that several stages hold must know of the others."""

    name: str
    """Canonical, the same for all copies."""
    ranks: Group
    """The ranks that hold copies, with me; of one rank when all copies are here."""
    is_first: bool
    """Of the first stage that holds it: the copy that is counted, and saved."""


class Member(NamedTuple):
    """One parameter of this rank's stage, and what is special about it."""

    info: ParameterInfo
    parameter: nn.Parameter
    layer: str
    """The element of the Sequential that uses it (the first, when several do)."""
    tied: Tie | None = None
    """None: no other stage holds it."""


def kind_of(member: Member) -> BucketKind:
    """What decides with which others a parameter may share a bucket."""
    info = member.info
    return BucketKind(info.decays, info.in_blocks, info.slice is None, info.sum_over_tp, member.tied)


class BucketKind(NamedTuple):
    """What the parameters of one bucket have in common."""

    decays: bool
    in_blocks: bool
    replicated_over_tp: bool
    sum_over_tp: bool
    tied: Tie | None

    def owns(self, tp_rank: int) -> bool:
        """True on the one rank, among those that hold the same weight, that counts it (norm, parameter numbers)."""
        return (not self.replicated_over_tp or tp_rank == 0) and (self.tied is None or self.tied.is_first)


class Place(NamedTuple):
    """Where a parameter lies in its bucket, in elements."""

    member: Member
    start: int
    stop: int


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients are summed in float32, whatever they are computed in; in float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Sharded(ABC):
    """Parameters of one kind, in flat tensors of which this replica's optimizer steps a shard: what the rest of the
    framework knows of them, however they are kept."""

    flat: Tensor | None = None
    """The whole weights, flat, where they are kept."""
    keeps_gradient: bool = False
    """Whether the whole gradient of this rank is there from one step to the next."""

    def __init__(
        self,
        kind: BucketKind,
        sharding: Sharding,
        places: Sequence[Place],
        numel: int,
        *,
        master: Tensor,
        shard_gradient: Tensor,
        same_dtype: bool,
        device: torch.device,
    ) -> None:
        self.kind = kind
        self.sharding = sharding
        self.places = list(places)
        self.numel = numel
        """Padding included."""
        self.shards_gradient = sharding.shard.size > 1
        self.shard_range = sharding.range_of(numel)
        self.master = master
        """What the optimizer steps."""
        self.shard_gradient = shard_gradient
        self.same_dtype = same_dtype
        """False: the optimizer steps master weights of more bits, copied back rounded."""
        self.device = device
        """Where it is computed, and where messages begin and end."""
        self.pending: Handle | None = None

    @abstractmethod
    def begin_step(self) -> None:
        """Forget the gradients."""

    def bring_gradient(self) -> Tensor:
        """My shard of it where the master is. Blocks until it is there."""
        return self.shard_gradient

    @abstractmethod
    def gather(self) -> None:
        """After the optimizer: post what must go to others before the next forward. Does not block."""

    def sum_shard(self, group: Group) -> None:
        """Post the sum of my shard's gradient over a group. Does not block."""
        self.pending = all_reduce(group, self.shard_gradient, self.device)

    def whole(self, shard: Tensor) -> Tensor:
        """The flat tensor out of the neighbours' shards. Every dp rank calls it."""
        if not self.shards_gradient:
            return shard
        shard = shard.to(self.device).contiguous()
        flat = torch.empty(self.numel, dtype=shard.dtype, device=self.device)
        self.sharding.shard.all_gather(flat, shard).wait()
        return flat

    @abstractmethod
    def whole_weights(self) -> Tensor:
        """What is computed with, flat. Every dp rank calls it."""

    @abstractmethod
    def load(self, weights: Tensor, master: Tensor | None) -> None:
        """Take over flat, whole tensors; None: the weights are the master."""

    @abstractmethod
    def local_weights(self, place: Place) -> Tensor:
        """What this rank holds of a parameter's weights."""

    @abstractmethod
    def leaf(self, place: Place) -> Tensor:
        """What autograd knows as the parameter."""

    @abstractmethod
    def gradient_view(self, place: Place) -> Tensor:
        """The gradient of one parameter, in its shape, as accumulated on this rank."""

    def local_gradient(self, first: int, stop: int) -> Tensor | None:
        """What this rank holds of the gradient after a step: elements [first, stop), which lie in one shard."""
        start, end = self.shard_range
        return self.shard_gradient[first - start : stop - start] if start <= first and stop <= end else None

    @abstractmethod
    def forget_local_gradient(self) -> None:
        """Before gradients are looked at as they are made."""

    def wait(self) -> None:
        """Block until whatever was posted last for this bucket is done."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


def all_reduce(group: Group, tensor: Tensor, device: torch.device) -> Handle:
    """The sum in place; of a tensor on the host by way of the device, which has the network. Does not block."""
    if group.size == 1 or tensor.device.type == device.type:
        return group.all_reduce(tensor)
    there = tensor.to(device)
    return group.all_reduce(there, finish=lambda: tensor.copy_(there))


def sum_over_tp(buckets: Sequence[Sharded], tp: Group) -> None:
    """After the replicas' sums, which may be under way: for parameters that saw only a part of the tokens or heads, on
    the shard alone, so that it costs a shard of the bucket only. Blocks."""
    for bucket in buckets:
        bucket.wait()
        if bucket.kind.sum_over_tp:
            bucket.sum_shard(tp)
    for bucket in buckets:
        bucket.wait()
