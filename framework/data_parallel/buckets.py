"""Parameters and gradients of a stage in flat buckets: one message each, one optimizer tensor each.

    parameters   | embedding.tokens ........ | block0.qkv ... | pad |     the modules' parameters are views of it
    gradients    | same places, fp32 (fp64 when training in fp64) ...|     accumulated over the micro-batches of a step
                 |<------- shard of replica 0 ------->|<- of 1 ----->|     ZeRO-1: what one replica's optimizer steps

    ZeRO-2: a replica keeps its shard of the gradient only; the whole of a bucket is there while a backward fills it.

A bucket holds parameters of one :class:`BucketKind` only, so that a flat tensor never mixes what is decayed with what
is not, or what is counted in the gradient norm once with what stands on every tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.data_parallel.sharding import BucketKind, Member, Place, Sharded, Sharding, accumulation_dtype, kind_of
from meshwright.optimizer.host_memory import HostMemory

ALIGNED_ELEMENTS = 8
"""Parameters and shards begin at multiples of this: 16 bytes of bfloat16, which tensor cores, NCCL, the optimizer's
vector loads and compiled kernels want of an address; or of the blocks that the optimizer keeps of matrices. What is
between is zero and stays so."""


def plan_buckets(members: Sequence[Member], bucket_bytes: int) -> list[tuple[BucketKind, list[Member]]]:
    """Group members by kind, last layer first as backward reaches them, about ``bucket_bytes`` each.

    A tied weight has a bucket of its own: the stages that share it must reduce the very same elements. They come in the
    order in which backward completes them: one with the norms of all layers is complete when all others are.
    """
    buckets: list[tuple[BucketKind, list[Member]]] = []
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


class Bucket(Sharded):
    """Some parameters of one kind in one flat tensor, their gradients in another, and this replica's shard of both."""

    flat: Tensor

    def __init__(
        self,
        kind: BucketKind,
        members: Sequence[Member],
        sharding: Sharding,
        *,
        keeps_gradient: bool = True,
        host: HostMemory | None = None,
        block_size: int = ALIGNED_ELEMENTS,
    ) -> None:
        """``host``: the optimizer steps there. ``block_size``: of what it keeps of matrices."""
        first = members[0].parameter
        aligned = math.lcm(ALIGNED_ELEMENTS, block_size) if kind.in_blocks else ALIGNED_ELEMENTS
        places: list[Place] = []
        end = 0
        for member in members:
            places.append(Place(member, end, end + member.parameter.numel()))
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
        """False: the whole gradient goes when it is reduced, and my shard has memory of its own."""
        self.flat_gradient: Tensor | None = None
        self.gradient_views: list[Tensor] = []
        """Of each place, while there is a whole gradient."""
        self._has_sum = False
        self._part: Tensor | None = None
        """What comes besides the sum that my shard has already."""
        self._is_last = False
        """Whether nothing will be added to what was posted last."""
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
        """Blocks until the copy of my gradient that was posted in this step is there."""
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
        """The whole gradient as accumulated on this rank; zero where there was none."""
        if self.flat_gradient is None:
            shard = self.shard_gradient
            self._set_gradient(torch.zeros(self.numel, dtype=shard.dtype, device=shard.device))
        assert self.flat_gradient is not None
        return self.flat_gradient

    def gradient_view(self, place: Place) -> Tensor:
        """The gradient of one parameter, in its shape, as accumulated on this rank."""
        return self.open_gradient()[place.start : place.stop].view(place.member.parameter.shape)

    def whole_weights(self) -> Tensor:
        """They are here."""
        return self.flat

    def load(self, weights: Tensor, master: Tensor | None) -> None:
        """Take over flat, whole tensors."""
        start, stop = self.shard_range
        self.flat.copy_(weights)
        self.master.copy_((weights if master is None else master)[start:stop])

    def local_weights(self, place: Place) -> Tensor:
        """The whole parameter."""
        return place.member.parameter.detach()

    def leaf(self, place: Place) -> Tensor:
        """The parameter."""
        return place.member.parameter

    def local_gradient(self, first: int, stop: int) -> Tensor | None:
        """Mine, and what I gave to the others' sums where the whole is kept."""
        return self.open_gradient()[first:stop] if self.keeps_gradient else super().local_gradient(first, stop)

    def forget_local_gradient(self) -> None:
        """The whole of it."""
        self.open_gradient().zero_()

    def begin_step(self) -> None:
        """Forget the sum over the replicas."""
        self._has_sum = False
        self._brought = None
        if not self.keeps_gradient:
            self._close_gradient()

    def _close_gradient(self) -> None:
        self.flat_gradient = None
        self.gradient_views = []

    def reduce(self, *, last: bool = True) -> None:
        """Post the sum over the replicas: into my shard, over its neighbours only, or everywhere (ZeRO-0). Does not
        block. Once per step; or, when the whole gradient is not kept, as often as one likes: the sums add up, and
        ``last`` says of which the result goes to the host.

        Bytes on the wire per rank, M = bytes of the bucket's gradients: among n neighbours M (n-1)/n, and then across
        r copies 2 M/n (r-1)/r; everywhere 2 M (r-1)/r.
        """
        gradient = self.open_gradient()
        if self.shards_gradient:
            part = self.shard_gradient
            if self._has_sum and not self.keeps_gradient:
                part = self._part = torch.empty_like(part)
            self._has_sum = True
            self.pending = self.sharding.shard.reduce_scatter(part, gradient)
            if not self.keeps_gradient:
                self._close_gradient()  # the message keeps it
        else:
            self.pending = self.sharding.copies.all_reduce(gradient)
        self._is_last, self._brought = last, None
        if self._part is None:
            self._bring_early()

    def reduce_across(self) -> None:
        """When my shard is summed over its neighbours: post its sum over those who hold the same. Does not block."""
        if self.shards_gradient and self.sharding.copies.size > 1:
            self.wait()
            self.pending = self.sharding.copies.all_reduce(self.shard_gradient)

    def wait(self) -> None:
        """Block until whatever was posted last for this bucket is done."""
        super().wait()
        if self._part is not None:
            self.shard_gradient.add_(self._part)
            self._part = None
            self._bring_early()

    def _bring_early(self) -> None:
        """Post the copy of my gradient to the host behind the sum that has just been posted, or what was just added
        of it, unless more will be added: it runs beside the rest of the backward."""
        kind = self.kind
        more = kind.sum_over_tp or kind.tied is not None or (self.shards_gradient and self.sharding.copies.size > 1)
        if self._host is not None and self._host_gradient is not None and self._is_last and not more:
            self._brought = self._host.bring(self._host_gradient, self.shard_gradient, self.pending)

    def bring_gradient(self) -> Tensor:
        """In the host's memory, where the optimizer steps there."""
        if self._host is None or self._host_gradient is None:
            return self.shard_gradient
        if self._brought is None:
            self._brought = self._host.bring(self._host_gradient, self.shard_gradient)
        self._brought()
        return self._host_gradient

    def gather(self) -> None:
        """After the optimizer: round the master weights back, post the all-gather of the shards. Does not block."""
        start, stop = self.shard_range
        shard = self.flat[start:stop]
        if self._host_weights is not None:
            shard.copy_(self._host_weights.copy_(self.master), non_blocking=True)
        elif self._host is not None or not self.same_dtype:
            shard.copy_(self.master, non_blocking=True)
        if self.shards_gradient:
            self.pending = self.sharding.shard.all_gather(self.flat, shard)
