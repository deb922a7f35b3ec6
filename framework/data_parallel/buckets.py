"""Parameters and gradients of a stage in flat buckets: one message each, one optimizer tensor each.

    parameters   | embedding.tokens ........ | block0.qkv ... | pad |     the modules' parameters are views of it
    gradients    | same places, fp32 (fp64 when training in fp64) ...|     accumulated over the micro-batches of a step
                 |<----- shard of dp_rank 0 ----->|<- dp_rank 1 ---->|     ZeRO-1: what one replica's optimizer steps

A bucket holds parameters of one :class:`BucketKind` only, so that a flat tensor never mixes what is decayed with what
is not, or what is counted in the gradient norm once with what stands on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from framework.mesh.comm import Group, Handle
from framework.parameters import ParameterInfo

ALIGNED_ELEMENTS = 8
"""Parameters and shards begin at multiples of this: 16 bytes of bfloat16, which tensor cores, NCCL, the optimizer's
vector loads and compiled kernels want of an address. The elements between are zero and stay so."""


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
    return BucketKind(info.decays, info.slice is None, info.sum_over_tp, member.tied)


class BucketKind(NamedTuple):
    """What the parameters of one bucket have in common."""

    decays: bool
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


def plan_buckets(members: Sequence[Member], bucket_bytes: int) -> list[tuple[BucketKind, list[Member]]]:
    """Group members by kind, last layer first as backward reaches them, about ``bucket_bytes`` each.

    A tied weight has a bucket of its own: the stages that share it must reduce the very same elements.
    """
    buckets: list[tuple[BucketKind, list[Member]]] = []
    open_buckets: dict[BucketKind, int] = {}
    filled: dict[BucketKind, int] = {}
    for member in reversed(members):
        kind = kind_of(member)
        size = member.parameter.numel() * accumulation_dtype(member.parameter.dtype).itemsize
        if kind.tied is not None or kind not in open_buckets or filled[kind] + size > bucket_bytes:
            open_buckets[kind] = len(buckets)
            filled[kind] = 0
            buckets.append((kind, []))
        buckets[open_buckets[kind]][1].append(member)
        filled[kind] += size
    return buckets


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Bucket:
    """Some parameters of one kind in one flat tensor, their gradients in another, and this replica's shard of both."""

    def __init__(self, kind: BucketKind, members: Sequence[Member], dp: Group, zero: int) -> None:
        self.kind = kind
        self.dp = dp
        first = members[0].parameter
        self.places: list[Place] = []
        end = 0
        for member in members:
            self.places.append(Place(member, end, end + member.parameter.numel()))
            end = _round_up(end + member.parameter.numel(), ALIGNED_ELEMENTS)
        num_shards = dp.size if zero else 1
        self.numel = _round_up(end, ALIGNED_ELEMENTS * num_shards)
        shard_index = dp.rank if zero else 0
        per_shard = self.numel // num_shards
        self.shard_range = (shard_index * per_shard, (shard_index + 1) * per_shard)
        gradient_dtype = accumulation_dtype(first.dtype)
        self.flat = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
        self.flat_gradient = torch.zeros(self.numel, dtype=gradient_dtype, device=first.device)
        for place in self.places:
            view = self.flat[place.start : place.stop].view(place.member.parameter.shape)
            view.copy_(place.member.parameter.detach())
            place.member.parameter.data = view
        self.shards_gradient = zero == 1 and dp.size > 1
        start, stop = self.shard_range
        self.shard_gradient = self.flat_gradient[start:stop]
        self.same_dtype = first.dtype == gradient_dtype
        """True: the optimizer steps the parameters themselves; False: fp32 master weights, copied back rounded."""
        shard = self.flat[start:stop]
        self.master = shard if self.same_dtype else shard.to(gradient_dtype)
        self.pending: Handle | None = None

    def gradient_view(self, place: Place) -> Tensor:
        """The gradient of one parameter, in its shape, as accumulated on this rank."""
        return self.flat_gradient[place.start : place.stop].view(place.member.parameter.shape)

    def reduce(self) -> None:
        """Post the sum over the replicas: into my shard (ZeRO-1) or everywhere (ZeRO-0). Once per step. Does not block.

        Bytes on the wire per rank, M = bytes of the bucket's gradients, n replicas: M (n-1)/n, or 2 M (n-1)/n.
        """
        if self.shards_gradient:
            self.pending = self.dp.reduce_scatter(self.shard_gradient, self.flat_gradient)
        else:
            self.pending = self.dp.all_reduce(self.flat_gradient)

    def wait(self) -> None:
        """Block until whatever was posted last for this bucket is done."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def gather(self) -> None:
        """After the optimizer: round the master weights back, post the all-gather of the shards. Does not block."""
        start, stop = self.shard_range
        shard = self.flat[start:stop]
        if not self.same_dtype:
            shard.copy_(self.master)
        if self.shards_gradient:
            self.pending = self.dp.all_gather(self.flat, shard)
