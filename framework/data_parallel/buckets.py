"""Flat buckets of a stage's parameters and gradients: one collective and one optimizer tensor per bucket.

    parameters   | embedding.tokens ........ | block0.qkv ... | pad |     the modules' parameters are views of it
    gradients    | same places, fp32 (fp64 when training in fp64) ...|     accumulated over the micro-batches of a step
                 |<------- shard of replica 0 ------->|<- of 1 ----->|     ZeRO-1: what one replica's optimizer steps

ZeRO-2: between backwards a replica keeps only its shard of the gradient. A bucket's full gradient exists only while a
backward fills it.

A bucket holds parameters of one :class:`BucketKind` only. So a flat tensor never mixes parameters with and without
weight decay. It also never mixes parameters split over tp with parameters that every tp rank holds, which the gradient
norm must count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.data_parallel.sharding import (
    BucketKind,
    BucketSlot,
    ShardedParameters,
    Sharding,
    StageParameter,
    accumulation_dtype,
    kind_of,
)
from meshwright.optimizer.host_memory import HostMemory

ALIGNED_ELEMENTS = 8
"""Alignment of parameters and shards, in elements; padding between them is zero and stays zero.

Eight elements are 16 bytes of bfloat16: the alignment for tensor cores, NCCL, the optimizer's vector loads and compiled
kernels. Matrices with 8-bit optimizer state are aligned to its blocks as well.
"""


def plan_buckets(members: Sequence[StageParameter], bucket_bytes: int) -> list[tuple[BucketKind, list[StageParameter]]]:
    """Group members into buckets of one kind and about ``bucket_bytes`` of gradient, last layer first as in backward.

    A tied weight has a bucket of its own, because the stages that share it must reduce the very same elements. Buckets
    are ordered by when backward completes them. A bucket with the norms of all layers therefore comes last.
    """
    buckets: list[tuple[BucketKind, list[StageParameter]]] = []
    complete: list[int] = []
    open_buckets: dict[BucketKind, int] = {}
    filled: dict[BucketKind, int] = {}
    for position, member in enumerate(reversed(members)):
        kind = kind_of(member)
        size = member.parameter.numel() * accumulation_dtype(member.parameter.dtype).itemsize
        if kind.tied is not None or kind not in open_buckets or filled[kind] + size > bucket_bytes:
            open_buckets[kind] = len(buckets)
            filled[kind] = 0
            buckets.append((kind, []))
            complete.append(position)
        buckets[open_buckets[kind]][1].append(member)
        complete[open_buckets[kind]] = position
        filled[kind] += size
    return [buckets[index] for index in sorted(range(len(buckets)), key=complete.__getitem__)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Bucket(ShardedParameters):
    """Parameters of one kind in one flat tensor, their gradients in another, and this replica's shard of both."""

    flat: Tensor

    def __init__(
        self,
        kind: BucketKind,
        members: Sequence[StageParameter],
        sharding: Sharding,
        *,
        keeps_gradient: bool = True,
        host: HostMemory | None = None,
        block_size: int = ALIGNED_ELEMENTS,
    ) -> None:
        """Move the members' weights into one flat tensor; the parameters become views of it.

        Args:
            keeps_gradient: keep the full gradient between steps (ZeRO-0 and 1), not only this rank's shard (ZeRO-2).
            host: host memory for master weights and optimizer state; None leaves both on the device.
            block_size: elements per block of 8-bit optimizer state; parameters kept in blocks are aligned to it.
        """
        first = members[0].parameter
        aligned = math.lcm(ALIGNED_ELEMENTS, block_size) if kind.in_blocks else ALIGNED_ELEMENTS
        places: list[BucketSlot] = []
        end = 0
        for member in members:
            places.append(BucketSlot(member, end, end + member.parameter.numel()))
            end = _round_up(end + member.parameter.numel(), aligned)
        numel = _round_up(end, aligned * sharding.shard.size)
        start, stop = sharding.range_of(numel)
        gradient_dtype = accumulation_dtype(first.dtype)
        self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        for place in places:
            view = self.flat[place.start : place.stop].view(place.member.parameter.shape)
            view.copy_(place.member.parameter.detach())
            place.member.parameter.data = view
        self.keeps_gradient = keeps_gradient or sharding.shard.size == 1
        """False: the full gradient is freed once it is reduced, and this rank's shard has its own memory."""
        self.flat_gradient: Tensor | None = None
        self.gradient_views: list[Tensor] = []
        """Gradient of each place in the parameter's shape; empty while there is no full gradient."""
        self._has_sum = False
        self._part: Tensor | None = None
        """Output buffer of a reduce-scatter whose result is added to a shard that already holds a sum."""
        self._is_last = False
        """True when the reduction that was posted last is the last of the step for this bucket."""
        kept = torch.zeros(numel if self.keeps_gradient else stop - start, dtype=gradient_dtype, device=first.device)
        same_dtype, master = first.dtype == gradient_dtype, self.flat[start:stop]
        if host is not None:
            master = host.room(stop - start, gradient_dtype).copy_(master)
        elif not same_dtype:
            master = master.to(gradient_dtype)
        super().__init__(
            kind,
            sharding,
            places,
            numel,
            master=master,
            shard_gradient=kept[start:stop] if self.keeps_gradient else kept,
            same_dtype=same_dtype,
            device=self.flat.device,
        )
        self._host = host
        self._host_gradient = self._host_weights = None
        self._brought: Callable[[], None] | None = None
        """Function that blocks until this step's gradient shard is copied to the host; None while no copy is posted."""
        if host is not None and host.is_apart:
            self._host_gradient = host.staging(stop - start, gradient_dtype)
            self._host_weights = None if same_dtype else host.staging(stop - start, first.dtype)
        if self.keeps_gradient:
            self._set_gradient(kept)

    def _set_gradient(self, flat_gradient: Tensor) -> None:
        self.flat_gradient = flat_gradient
        self.gradient_views = [
            flat_gradient[place.start : place.stop].view(place.member.parameter.shape) for place in self.places
        ]

    def open_gradient(self) -> Tensor:
        """Return this rank's full accumulated gradient (numel,); allocate zeros if there is none."""
        if self.flat_gradient is None:
            shard = self.shard_gradient
            self._set_gradient(torch.zeros(self.numel, dtype=shard.dtype, device=shard.device))
        assert self.flat_gradient is not None
        return self.flat_gradient

    def gradient_view(self, place: BucketSlot) -> Tensor:
        """Return one parameter's gradient in the parameter's shape, as accumulated on this rank before reduction."""
        return self.open_gradient()[place.start : place.stop].view(place.member.parameter.shape)

    def whole_weights(self) -> Tensor:
        """Return the full flat weights (no communication)."""
        return self.flat

    def load(self, weights: Tensor, master: Tensor | None) -> None:
        """Copy full flat tensors (numel,) into the weights, and their shard into the master weights."""
        start, stop = self.shard_range
        self.flat.copy_(weights)
        self.master.copy_((weights if master is None else master)[start:stop])

    def local_weights(self, place: BucketSlot) -> Tensor:
        """Return the full parameter, detached."""
        return place.member.parameter.detach()

    def leaf(self, place: BucketSlot) -> Tensor:
        """Return the module's own parameter."""
        return place.member.parameter

    def local_gradient(self, first: int, stop: int) -> Tensor | None:
        """Return elements [first, stop) of the gradient after a step, or None where this rank does not hold them.

        Where the full gradient is kept, elements outside this rank's shard hold this rank's own contribution to the
        sum.
        """
        return self.open_gradient()[first:stop] if self.keeps_gradient else super().local_gradient(first, stop)

    def forget_local_gradient(self) -> None:
        """Zero the full accumulated gradient."""
        self.open_gradient().zero_()

    def begin_step(self) -> None:
        """Mark last step's reduced gradient as stale, and free the full gradient where it is not kept."""
        self._has_sum = False
        self._brought = None
        if not self.keeps_gradient:
            self._close_gradient()

    def _close_gradient(self) -> None:
        self.flat_gradient = None
        self.gradient_views = []

    def reduce(self, *, last: bool = True) -> None:
        """Post the gradient reduction over the replicas. Does not block.

        With shards it is a reduce-scatter over the neighbours that hold the other shards; :meth:`reduce_across`
        completes the sum. Under ZeRO-0 it is an all-reduce over all replicas. It is called once per step where the full
        gradient is kept, and any number of times otherwise, because the sums accumulate.

        Bytes on the wire per rank, M = bytes of the bucket's gradients: among n neighbours M (n-1)/n, and then across r
        copies 2 M/n (r-1)/r; everywhere 2 M (r-1)/r.

        Args:
            last: this is the step's last reduction, so that its result may be copied to the host.
        """
        gradient = self.open_gradient()
        if self.shards_gradient:
            part = self.shard_gradient
            if self._has_sum and not self.keeps_gradient:
                part = self._part = torch.empty_like(part)
            self._has_sum = True
            self.pending = self.sharding.shard.reduce_scatter(part, gradient)
            if not self.keeps_gradient:
                self._close_gradient()  # the collective holds the tensor until it is done
        else:
            self.pending = self.sharding.copies.all_reduce(gradient)
        self._is_last, self._brought = last, None
        if self._part is None:
            self._bring_early()

    def reduce_across(self) -> None:
        """Post an all-reduce of this rank's gradient shard over the replicas that hold the same shard.

        Waits for the reduce-scatter over the neighbours, and does not wait for its own sum. Does nothing without
        shards.
        """
        if self.shards_gradient and self.sharding.copies.size > 1:
            self.wait()
            self.pending = self.sharding.copies.all_reduce(self.shard_gradient)

    def wait(self) -> None:
        """Block until the collective that was posted last for this bucket is done; add its result to an earlier sum."""
        super().wait()
        if self._part is not None:
            self.shard_gradient.add_(self._part)
            self._part = None
            self._bring_early()

    def _bring_early(self) -> None:
        """Post the device-to-host copy of this rank's gradient shard, to overlap it with the rest of the backward.

        The copy waits on its own stream for the reduction just posted. Nothing is posted while other sums are still to
        be added to the shard.
        """
        kind = self.kind
        more = kind.sum_over_tp or kind.tied is not None or (self.shards_gradient and self.sharding.copies.size > 1)
        if self._host is not None and self._host_gradient is not None and self._is_last and not more:
            self._brought = self._host.bring(self._host_gradient, self.shard_gradient, self.pending)

    def bring_gradient(self) -> Tensor:
        """Return this rank's gradient shard, in host memory where the optimizer steps there. Blocks until complete."""
        if self._host is None or self._host_gradient is None:
            return self.shard_gradient
        if self._brought is None:
            self._brought = self._host.bring(self._host_gradient, self.shard_gradient)
        self._brought()
        return self._host_gradient

    def gather(self) -> None:
        """Round the master weights into the weights, and post their all-gather over the shard group. Does not block.

        Bytes on the wire per rank: M (n-1)/n, M = bytes of the bucket's weights, n = ranks of the shard group.
        """
        start, stop = self.shard_range
        shard = self.flat[start:stop]
        if self._host_weights is not None:
            shard.copy_(self._host_weights.copy_(self.master), non_blocking=True)
        elif self._host is not None or not self.same_dtype:
            shard.copy_(self.master, non_blocking=True)
        if self.shards_gradient:
            self.pending = self.sharding.shard.all_gather(self.flat, shard)
