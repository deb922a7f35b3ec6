"""Flat buckets of a stage's parameters and gradients:
one collective and one optimizer tensor per bucket.

    parameters   | block0.qkv ... | embedding.tokens ........ | pad |     last layer first; parameters are views of it
    gradients    | same slots, fp32 (fp64 when training in fp64) ....|     accumulated over the micro-batches of a step
                 |<------- shard of replica 0 ------->|<- of 1 ----->|     ZeRO-1: each replica's optimizer steps one

ZeRO-2, reduced per micro-batch: between backwards a replica keeps only its shard of the gradient. A
bucket's full gradient exists only while a backward fills it.

A bucket holds parameters of one :class:`BucketKind` only. So a flat tensor never mixes parameters
with and without weight decay. All its parameters have the same holders: one sum over each group
reduces them together, and one rank counts them in the gradient norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.data_parallel.sharding import (
    BucketSlot,
    ShardedParameters,
    StageParameter,
    accumulation_dtype,
)

ALIGNED_ELEMENTS = 8
"""Alignment of parameters and shards, in elements; padding between them is zero and stays zero.

Eight elements are 16 bytes of bfloat16: the alignment for tensor cores, NCCL, the optimizer's
vector loads and compiled kernels. Matrices with 8-bit optimizer state are aligned to its blocks as
well.
"""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _lay_out(members: Sequence[StageParameter], alignment: int) -> list[BucketSlot]:
    """Return the slot of each member, one after the other;
    each starts at a multiple of ``alignment`` elements.
    """
    slots: list[BucketSlot] = []
    start = 0
    for member in members:
        slots.append(BucketSlot(member, start, start + member.parameter.numel()))
        start = _round_up(slots[-1].stop, alignment)
    return slots


class Bucket(ShardedParameters):
    """Parameters of one kind in one flat tensor, their gradients in another,
    and this replica's shard of both.
    """

    flat: Tensor

    def __init__(
        self,
        members: Sequence[StageParameter],
        *,
        keeps_gradient: bool = True,
        block_size: int = ALIGNED_ELEMENTS,
    ) -> None:
        """Move the members' weights into one flat tensor; the parameters become views of it.

        Args:
            keeps_gradient: keep the full gradient between steps (ZeRO-0 and 1), not only this
                rank's shard (ZeRO-2).
            block_size: elements per block of 8-bit optimizer state; parameters kept in blocks are
                aligned to it.
        """
        first = members[0]
        dtype = first.parameter.dtype
        device = first.parameter.device
        alignment = ALIGNED_ELEMENTS
        if first.kind.is_eight_bit:
            alignment = math.lcm(alignment, block_size)
        slots = _lay_out(members, alignment)
        numel = _round_up(slots[-1].stop, alignment * first.holders.shard_group.size)
        super().__init__(slots, numel, dtype, device)
        self.flat = torch.zeros(self.numel, dtype=dtype, device=device)
        for view, slot in zip(self._views(self.flat), slots, strict=True):
            view.copy_(slot.member.parameter.detach())
            slot.member.parameter.data = view
        start, stop = self.shard_range
        self.master = self.make_master(self.flat[start:stop], accumulation_dtype(dtype))
        self.keeps_gradient = keeps_gradient or not self.is_sharded
        self.gradient_views: list[Tensor] = []
        """Gradient of each slot in the parameter's shape; empty while there is no full gradient."""
        if self.keeps_gradient:
            self.shard_gradient = self.open_gradient()[start:stop]
        else:
            self.shard_gradient = torch.zeros(stop - start, dtype=self.master.dtype, device=device)
        self._has_sum = False
        """True when the gradient shard holds the sum over earlier micro-batches of this step."""
        self._part: Tensor | None = None
        """Output of the posted reduce-scatter if :meth:`wait` is to add it to that sum."""

    def make_master(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return master weights: the shard of the weights itself,
        or a copy of it in a dtype with more bits.
        """
        return weights.to(dtype)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return the view of each slot in a flat tensor (numel,), in the parameter's shape."""
        return [
            flat[slot.start : slot.stop].view(slot.member.parameter.shape) for slot in self.slots
        ]

    def open_gradient(self) -> Tensor:
        """Return this rank's full accumulated gradient (numel,);
        allocate zeros if there is none.
        """
        if self.flat_gradient is None:
            self.flat_gradient = torch.zeros(
                self.numel, dtype=self.master.dtype, device=self.device
            )
            self.gradient_views = self._views(self.flat_gradient)
        return self.flat_gradient

    def _close_gradient(self) -> None:
        self.flat_gradient = None
        self.gradient_views = []

    def leaf(self, slot: BucketSlot) -> Tensor:
        """Return the module's own parameter."""
        return slot.member.parameter

    def gradient_of(self, slot: BucketSlot) -> Tensor:
        """Return one parameter's gradient in the parameter's shape,
        as accumulated on this rank before reduction.
        """
        return self.open_gradient()[slot.start : slot.stop].view(slot.member.parameter.shape)

    def begin_step(self) -> None:
        """Begin a new sum in the shard, and free the full gradient where it is not kept."""
        self._has_sum = False
        if not self.keeps_gradient:
            self._close_gradient()

    def reduce(self, *, last: bool = True) -> None:
        """Post the gradient reduction over the replicas. Does not block.

        Not sharded: an all-reduce over all replicas, when ``last``; earlier calls do nothing.
        Sharded: a reduce-scatter over the shard group; :meth:`reduce_across` completes the sum over
        all replicas. Where the full gradient is kept, once per step. Where it is not, any number of
        times: :meth:`wait` adds each result to the shard.

        Bytes on the wire per rank, M = bytes of the bucket's gradients, n shards, r copies: M
        (n-1)/n, across copies 2 M/n (r-1)/r; not sharded 2 M (r-1)/r.

        Args:
            last: this is the step's last reduction of the bucket. A bucket that is not sharded is
                reduced only then, and an offloaded one then copies the result to the host.
        """
        gradient = self.open_gradient()
        # NCCL's stream waits for the current one, on which backward has written the gradient
        if not self.is_sharded:
            if last:
                self.pending = self.holders.copies_group.all_reduce(gradient)
            return
        output = self.shard_gradient
        if self._has_sum and not self.keeps_gradient:
            # the shard holds the sum of earlier micro-batches, to which wait() adds this one
            output = self._part = torch.empty_like(output)
        self._has_sum = True
        self.pending = self.holders.shard_group.reduce_scatter(output, gradient)
        if not self.keeps_gradient:
            self._close_gradient()  # the handle keeps the tensor alive until wait()

    def reduce_across(self) -> None:
        """Post an all-reduce of this rank's gradient shard over the replicas
        that hold the same shard.

        Blocks until the reduce-scatter over the shard group is done, but not for its own
        all-reduce. Does nothing if the bucket is not sharded.
        """
        if self.is_sharded and self.holders.copies_group.size > 1:
            # each group has a stream of its own: the current one hands the shard over
            self.wait()
            self.sum_shard(self.holders.copies_group)

    def wait(self) -> None:
        """Block until the collective that was posted last for this bucket is done;
        add its result to an earlier sum.
        """
        super().wait()
        if self._part is not None:
            self.shard_gradient.add_(self._part)
            self._part = None

    def gather(self) -> None:
        """Round the master weights into the weights,
        and post their all-gather over the shard group. Does not block.

        Bytes on the wire per rank: M (n-1)/n, M = bytes of the bucket's weights, n = ranks of the
        shard group.
        """
        start, stop = self.shard_range
        shard = self.flat[start:stop]
        self.copy_master(shard)  # on the current stream, which the all-gather waits for
        if self.is_sharded:
            self.pending = self.holders.shard_group.all_gather(self.flat, shard)

    def copy_master(self, shard: Tensor) -> None:
        """Copy the master weights into this rank's shard of the weights,
        unless they are the same memory.
        """
        if self.is_mixed_precision:
            shard.copy_(self.master, non_blocking=True)
