"""One stage on one data-parallel replica: gradient accumulation and reduction,
and the all-gather of the weights.

                   backwards of a step                forward of the next step
micro-batches      B0   B1   B2   B3                  | layer | layer | layer
last gradients     ..   ..   ..   .#.#.#
buckets                             r r r -> wait     g g g ->  wait just before the layer that needs it
                                    |                 |
                   r reduces a bucket as the last     g: all-gathers posted together after the step,
                   backward completes it (#); with    first layer first
                   reduces_each_microbatch as
                   every backward does
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence, Set
from enum import Enum, auto
from functools import partial

from torch import Tensor, nn

from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.members import plan_buckets
from meshwright.data_parallel.offload import OffloadedBucket
from meshwright.data_parallel.products import offer_products
from meshwright.data_parallel.sharding import (
    ShardedParameters,
    StageParameter,
    sum_partial,
)
from meshwright.optimizer import HostMemory


class Replica(ABC):
    """A stage's parameters on one replica, for any ZeRO stage.

    Calls of a step, in the order in which the methods stand here:

    begin_step                                   take_step
    wait_for_layer                               pipeline/layer_calls.py, before each forward of a layer
    reduce_during_backward, reduce_remaining     the executor, before and after a backward that reduces
    finish_reduction                             the executor, at REDUCE

    STEP then sums ties, clips and updates the shards; the optimizer posts each bucket's all-gather.
    ``wait_for_weights`` is for those who read weights between steps, such as a save.
    """

    buckets: Sequence[ShardedParameters]
    """Parameters that are trained."""
    frozen: Sequence[StageParameter]
    """Whole parameters that are not trained: no bucket, gradient or optimizer state;
    the same values on every replica.
    """
    frozen_shards: Sequence[ShardedParameters] = ()
    """Sharded parameters that are not trained (ZeRO-3)."""

    @abstractmethod
    def begin_step(self) -> None:
        """Discard the gradients of the previous step."""

    @abstractmethod
    def wait_for_layer(self, layer: str) -> None:
        """Block until all that is posted for a layer's weights is done,
        before the forward of the layer.
        """

    @abstractmethod
    def reduce_during_backward(
        self, awaited: Set[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Make the next backward of this stage reduce gradients as soon as it has completed them.

        Called before the step's last backward; with ``reduces_each_microbatch`` before every one.

        Args:
            awaited: the parameters that the backward adds gradients to (W of a split backward);
                None: all. The other gradients are complete already.
            last: this is the step's last backward.
        """

    @abstractmethod
    def reduce_remaining(self) -> None:
        """Post the reductions that a backward, not the step's last, has left.

        ZeRO-2 first waits for the bucket before, so that one full gradient is in flight; on CUDA
        only the stream waits.
        """

    @abstractmethod
    def finish_reduction(self) -> None:
        """Make every shard hold the gradient of the global batch, over the replicas and over tp.

        Posts what the last backward has left, waits, and sums over the copies group and over tp,
        where gradients are partial. Blocks. Tied weights still lack the gradients of the copies
        on other stages: see :func:`~.ties.sum_ties`.
        """

    @abstractmethod
    def wait_for_weights(self) -> None:
        """Block until the weights of all layers are complete."""


class GradientState(Enum):
    """State of one parameter's gradient: the sum over a step's micro-batches, in a bucket's slot.

    from            to           when
    any             STALE        begin_step; ZeRO-2: the bucket is reduced, and its gradient freed
    STALE           SUMMED       first gradient of the step: overwrites the slot
    SUMMED          SUMMED       further gradients: added
    STALE, SUMMED   MULTIPLIED   a GEMM overwrites the slot, or adds to it (products.py)
    MULTIPLIED      SUMMED       the parameter's hook, which runs once after all its products
    STALE           SUMMED       no gradient by the end of the backward: the sum is zero
    """

    STALE = auto()
    """The slot holds the last step's gradient, or zeros."""
    MULTIPLIED = auto()
    """The slot holds a product that the parameter's hook has yet to count."""
    SUMMED = auto()
    """The slot holds the sum of this step's gradients so far."""


class BackwardState(Enum):
    """Effect of a stage's running backward on a bucket that it completes."""

    ACCUMULATES = auto()
    """No reduction: later micro-batches add to the bucket."""
    REDUCES = auto()
    """Reduction in every micro-batch (ZeRO-2)."""
    REDUCES_LAST = auto()
    """Reduction in the step's last backward."""


class BucketReplica(Replica):
    """Flat parameters and gradients of one stage on one replica (ZeRO-0, 1 and 2)."""

    def __init__(
        self,
        members: Sequence[StageParameter],
        *,
        bucket_bytes: int,
        keeps_gradient: bool = True,
        host: HostMemory | None = None,
        block_size: int = 1,
    ) -> None:
        """Move the parameters into buckets, and add each gradient to its bucket
        when autograd has computed it.
        """
        self.frozen = [member for member in members if not member.parameter.requires_grad]
        trained = [member for member in members if member.parameter.requires_grad]
        make_bucket = Bucket if host is None else partial(OffloadedBucket, host)
        self.buckets: list[Bucket] = [
            make_bucket(group, keeps_gradient=keeps_gradient, block_size=block_size)
            for group in plan_buckets(trained, bucket_bytes)
        ]
        self._buckets_of_layer: dict[str, list[Bucket]] = defaultdict(list)
        self._states = [[GradientState.STALE] * len(bucket.slots) for bucket in self.buckets]
        """State of each gradient, by bucket and slot."""
        self._backward = BackwardState.ACCUMULATES
        self._missing = [0] * len(self.buckets)
        """By bucket: number of parameters whose gradient the reducing backward has yet to add."""
        self._next_bucket = 0
        """The bucket that the reducing backward posts next."""
        for index, bucket in enumerate(self.buckets):
            for number, slot in enumerate(bucket.slots):
                buckets_of_layer = self._buckets_of_layer[slot.member.layer]
                if bucket not in buckets_of_layer:
                    buckets_of_layer.append(bucket)
                self._register_hooks(slot.member.parameter, index=index, number=number)

    def _register_hooks(self, parameter: nn.Parameter, *, index: int, number: int) -> None:
        """Register the hooks that add a parameter's gradients and products to its slot.

        NOTE [weak hooks]: a parameter's hooks refer to the replica weakly, and do nothing without
        it. Python's garbage collector does not see them: a strong reference would keep hooks,
        buckets and connections alive forever.
        """
        replica = weakref.ref(self)
        hook = partial(BucketReplica._accumulated, replica, index=index, number=number)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        begin_product = partial(BucketReplica._begin_product, replica, index=index, number=number)
        offer_products(parameter, self.buckets[index].master.dtype, begin_product, finish=hook)

    def begin_step(self) -> None:
        """Mark the gradients of the last step as stale.

        A step's first gradient overwrites the old one, which is cheaper than zeroing and adding.
        """
        self._backward = BackwardState.ACCUMULATES
        for index, bucket in enumerate(self.buckets):
            self._mark_stale(index)
            bucket.begin_step()
            for slot in bucket.slots:
                # else autograd would add to the view that it got in the last step
                slot.member.parameter.grad = None

    def _mark_stale(self, index: int) -> None:
        self._states[index] = [GradientState.STALE] * len(self._states[index])

    @staticmethod
    def _accumulated(
        reference: weakref.ref[BucketReplica], parameter: Tensor, *, index: int, number: int
    ) -> None:
        """Add one parameter's gradient of a micro-batch to its bucket,
        after autograd has computed it.

        float32, gradient kept    ``grad`` is the bucket's view: autograd adds to it in place
        16 bits, gradient kept    ``grad`` is a temporary, added to the view and freed
        gradient not kept         the same, because the bucket's gradient is freed after each reduction (ZeRO-2)
        """
        replica = reference()
        if replica is None:
            return
        gradient = parameter.grad
        states = replica._states[index]
        if gradient is None and states[number] is not GradientState.MULTIPLIED:
            return  # this is the I of a split backward, which leaves the gradient to its W
        bucket = replica.buckets[index]
        if not bucket.gradient_views:
            bucket.open_gradient()
        view = bucket.gradient_views[number]
        if gradient is not None and gradient is not view:
            if states[number] is GradientState.STALE:
                view.copy_(gradient)
            else:
                view.add_(gradient)
            adds_in_place = bucket.keeps_gradient and not bucket.is_mixed_precision
            parameter.grad = view if adds_in_place else None
        states[number] = GradientState.SUMMED
        if replica._backward is not BackwardState.ACCUMULATES:
            replica._missing[index] -= 1
            replica._post_complete()

    @staticmethod
    def _begin_product(
        reference: weakref.ref[BucketReplica], *, index: int, number: int
    ) -> tuple[Tensor, bool] | None:
        """Return (slot for a product of a GEMM, True if the product overwrites it); the parameter's
        hook counts it later.
        """
        replica = reference()
        if replica is None:
            return None
        states = replica._states[index]
        bucket = replica.buckets[index]
        is_first = states[number] is GradientState.STALE
        states[number] = GradientState.MULTIPLIED
        bucket.open_gradient()
        return bucket.gradient_views[number], is_first

    def reduce_during_backward(
        self, awaited: Set[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Make the next backward reduce each bucket once all its gradients are there;
        see :class:`Replica`.
        """
        self._backward = BackwardState.REDUCES_LAST if last else BackwardState.REDUCES
        self._next_bucket = 0
        for index, bucket in enumerate(self.buckets):
            num_awaited = len(bucket.slots)
            if awaited is not None:
                num_awaited = len([s for s in bucket.slots if s.member.parameter in awaited])
            self._missing[index] = num_awaited
        if awaited is not None:
            self._zero_stale(awaited)
            self._post_complete()  # buckets without an awaited gradient

    def _post_complete(self) -> None:
        """Post reductions of complete buckets, in bucket order only,
        because every replica must post in the same order.
        """
        while self._next_bucket < len(self.buckets) and self._missing[self._next_bucket] <= 0:
            self._reduce(self._next_bucket)
            self._next_bucket += 1

    def _reduce(self, index: int) -> None:
        """Post the reduction of one bucket."""
        bucket = self.buckets[index]
        if not bucket.keeps_gradient:
            # At most one full gradient of the stage is in flight: the collective holds its memory
            # until it is awaited. Bucket -1 is the one that the previous backward posted last.
            self.buckets[index - 1].wait()
            bucket.wait()  # its own reduction of the previous micro-batch
            self._mark_stale(index)
        bucket.reduce(last=self._backward is BackwardState.REDUCES_LAST)

    def _zero_stale(self, awaited: Set[Tensor] = frozenset()) -> None:
        """Zero the gradients that had nothing in this step, except the ``awaited`` parameters'."""
        for bucket, states in zip(self.buckets, self._states, strict=True):
            for number, slot in enumerate(bucket.slots):
                if states[number] is GradientState.STALE and slot.member.parameter not in awaited:
                    if bucket.keeps_gradient:  # other buckets start from zeros
                        bucket.gradient_views[number].zero_()
                    states[number] = GradientState.SUMMED

    def reduce_remaining(self) -> None:
        """Post the reduction of all remaining buckets after the backward; see :class:`Replica`.

        A parameter that the backward did not reach leaves its bucket incomplete. Such a bucket is
        reduced here.
        """
        self._zero_stale()
        self._missing = [0] * len(self.buckets)
        self._post_complete()
        self._backward = BackwardState.ACCUMULATES

    def finish_reduction(self) -> None:
        """Block until every shard holds the gradient of the global batch; see :class:`Replica`."""
        if self._backward is BackwardState.ACCUMULATES:  # no backward has reduced: all remain
            self._next_bucket = 0
        self._backward = BackwardState.REDUCES_LAST
        self.reduce_remaining()
        for bucket in self.buckets:
            bucket.reduce_across()
        sum_partial(self.buckets)

    def wait_for_layer(self, layer: str) -> None:
        """Block until all that is posted for a layer's buckets is done: all-gathers;
        in ZeRO-2 a reduction too.
        """
        for bucket in self._buckets_of_layer[layer]:
            if bucket.pending is not None:
                bucket.wait()

    def wait_for_weights(self) -> None:
        """Block until the weights of all layers are complete."""
        for bucket in self.buckets:
            bucket.wait()
