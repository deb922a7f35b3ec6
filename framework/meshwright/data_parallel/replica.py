"""One stage on one data-parallel replica: gradient accumulation and reduction, and the all-gather of the weights.

micro-batches      B0   B1   B2   B3                  forward of the next step
backward           ..   ..   ..   .#.#.#              | layer | layer | layer
buckets                             r r r -> wait     g g g ->  wait just before the layer that needs it
                                    |                 |
                   each reduced as the last           all-gathers posted together after the step,
                   backward completes it              first layer first
                   (ZeRO-2: as every backward does)
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.expert_stage import ExpertStage, StageSharding
from meshwright.data_parallel.fully_sharded import FullyShardedStage
from meshwright.data_parallel.members import plan_buckets
from meshwright.data_parallel.offload import OffloadedBucket
from meshwright.data_parallel.products import offer_products
from meshwright.data_parallel.sharding import ShardedParameters, StageParameter, sum_over_tp
from meshwright.mesh.comm import Group
from meshwright.optimizer import HostMemory


@dataclass
class _Reduction:
    """Reductions of all buckets of a stage during one backward, in bucket order."""

    missing: list[int]
    """By bucket: number of parameters whose gradient the backward has yet to add."""
    is_last: bool
    """True when this backward is the step's last."""
    next_bucket: int = 0


class StageReplica:
    """Flat parameters and gradients of one stage on one replica (ZeRO-0, 1 and 2)."""

    def __init__(
        self,
        members: Sequence[StageParameter],
        sharding: StageSharding,
        tp: Group,
        *,
        bucket_bytes: int,
        keeps_gradient: bool = True,
        host: HostMemory | None = None,
        block_size: int = 1,
    ) -> None:
        """Move the parameters into buckets, and add each gradient to its bucket when autograd has computed it."""
        self.tp = tp
        self.frozen = [member for member in members if not member.parameter.requires_grad]
        """Parameters that are not trained: no bucket, gradient or optimizer state; the same values on every replica."""
        self.frozen_shards: Sequence[ShardedParameters] = ()  # only ZeRO-3 has any
        trained = [member for member in members if member.parameter.requires_grad]
        make_bucket = Bucket if host is None else partial(OffloadedBucket, host)
        self.buckets: list[Bucket] = [
            make_bucket(group, sharding.of(group[0]), keeps_gradient=keeps_gradient, block_size=block_size)
            for group in plan_buckets(trained, bucket_bytes)
        ]
        self._buckets_of_layer: dict[str, list[Bucket]] = defaultdict(list)
        self._reduction: _Reduction | None = None
        """Reductions of the running backward; None while gradients only accumulate."""
        self._members = [frozenset(slot.member.parameter for slot in bucket.slots) for bucket in self.buckets]
        """Parameters of each bucket."""
        self._untouched: set[Tensor] = set()
        """Parameters without a gradient since begin_step or the bucket's last reduction; slots are stale or zero."""
        self._multiplied: set[Tensor] = set()
        """Parameters whose gradient a GEMM added to the bucket (fused accumulation, products.py), not counted yet."""
        for index, bucket in enumerate(self.buckets):
            for number, (member, _, _) in enumerate(bucket.slots):
                if bucket not in self._buckets_of_layer[member.layer]:
                    self._buckets_of_layer[member.layer].append(bucket)
                if not bucket.is_mixed_precision and bucket.keeps_gradient:
                    member.parameter.grad = bucket.gradient_views[number]
                hook = partial(StageReplica._accumulated, weakref.ref(self), index=index, number=number)
                member.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                offer_products(self, member.parameter, hook, index=index, number=number)

    def begin_step(self) -> None:
        """Mark the gradients of the last step as stale.

        A step's first gradient overwrites the old one, which is cheaper than zeroing and adding.
        """
        self._reduction = None
        self._untouched.update(*self._members)
        for bucket in self.buckets:
            bucket.begin_step()
            for slot in bucket.slots:
                slot.member.parameter.grad = None

    @staticmethod
    def _accumulated(reference: weakref.ref[StageReplica], parameter: Tensor, *, index: int, number: int) -> None:
        """Add one parameter's gradient of a micro-batch to its bucket, after autograd has computed it.

        float32, gradient kept    ``grad`` is the bucket's view: autograd adds to it in place
        16 bits, gradient kept    ``grad`` is a temporary, added to the view and freed
        gradient not kept         the same, because the bucket's gradient is freed after each reduction (ZeRO-2)

        NOTE [weak hooks]: a parameter's hooks refer to the replica weakly, and do nothing without it. Python's garbage
        collector does not see them: a strong reference would keep hooks, buckets and connections alive forever.
        """
        replica, gradient = reference(), parameter.grad
        if replica is None or (gradient is None and parameter not in replica._multiplied):  # after I: deferred to W
            return
        if replica._multiplied:
            replica._multiplied.discard(parameter)
        bucket = replica.buckets[index]
        if not bucket.gradient_views:
            bucket.open_gradient()
        view = bucket.gradient_views[number]
        if gradient is not None and gradient is not view:  # the step's first gradient, or one of another dtype
            if parameter in replica._untouched:
                replica._untouched.remove(parameter)
                view.copy_(gradient)
            else:
                view.add_(gradient)
            parameter.grad = view if not bucket.is_mixed_precision and bucket.keeps_gradient else None
        if replica._reduction is not None:
            replica._reduction.missing[index] -= 1
            replica._post_complete(replica._reduction)

    def begin_product(self, parameter: Tensor, *, index: int, number: int) -> tuple[Tensor, bool]:
        """Return (gradient in the bucket to which a GEMM adds a product, True if it is the first of this step)."""
        self.buckets[index].open_gradient()
        is_first = parameter in self._untouched
        self._untouched.discard(parameter)
        self._multiplied.add(parameter)  # the parameter's hook counts it later
        return self.buckets[index].gradient_views[number], is_first

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Start to reduce each bucket as soon as the next backward of this stage has completed it.

        Called before the step's last backward; with ``reduces_each_microbatch`` before every backward.

        Args:
            awaited: the parameters that the backward adds gradients to; None: all. The other gradients are complete
                already.
            last: this is the step's last backward.
        """
        missing = [len(members if awaited is None else members & awaited) for members in self._members]
        self._reduction = _Reduction(missing, last)
        if awaited is not None:
            self._zero_untouched(frozenset().union(*self._members) - awaited)
            self._post_complete(self._reduction)

    def _post_complete(self, reduction: _Reduction) -> None:
        """Post reductions of complete buckets, in bucket order only, because every replica must post in the same order.

        Where the full gradient is not kept, at most one reduction of a stage is in flight: the previous one is awaited
        first.
        """
        while reduction.next_bucket < len(self.buckets) and reduction.missing[reduction.next_bucket] <= 0:
            bucket = self.buckets[reduction.next_bucket]
            if not bucket.keeps_gradient:
                self.buckets[reduction.next_bucket - 1].wait()  # index -1: the previous backward's last bucket
                bucket.wait()  # its own reduction of the previous micro-batch
                self._untouched |= self._members[reduction.next_bucket]
            bucket.reduce(last=reduction.is_last)
            reduction.next_bucket += 1

    def _zero_untouched(self, parameters: Set[Tensor]) -> None:
        """Zero the gradients of those ``parameters`` that had none in this step."""
        zeroed = self._untouched & parameters
        for bucket in self.buckets:
            if zeroed and bucket.keeps_gradient:  # other buckets start from zeros
                for view, slot in zip(bucket.gradient_views, bucket.slots, strict=True):
                    if slot.member.parameter in zeroed:
                        view.zero_()
        self._untouched -= zeroed

    def end_reducing(self) -> None:
        """Post the reduction of all remaining buckets after the backward. Does not block.

        A parameter that the backward did not reach leaves its bucket incomplete. Such a bucket is reduced here.
        """
        self._zero_untouched(set(self._untouched))
        reduction = self._reduction or _Reduction([], is_last=True)
        reduction.missing = [0] * len(self.buckets)
        self._post_complete(reduction)
        self._reduction = None

    def finish_reduce(self) -> None:
        """Block until every shard holds the gradient of the global batch, over the replicas and over tp.

        Tied weights still lack the gradients of the copies on other stages: see :func:`~.members.sum_ties`.
        """
        if self._reduction is not None:
            self._reduction.is_last = True
        self.end_reducing()
        for bucket in self.buckets:
            bucket.reduce_across()
        sum_over_tp(self.buckets, self.tp)

    def wait_for_layer(self, layer: str) -> None:
        """Block until all that is posted for a layer's buckets is done: all-gathers; in ZeRO-2 a reduction too."""
        for bucket in self._buckets_of_layer[layer]:
            if bucket.pending is not None:
                bucket.wait()

    def wait_for_weights(self) -> None:
        """Block until the weights of all layers are complete."""
        for bucket in self.buckets:
            bucket.wait()


Replica = StageReplica | FullyShardedStage | ExpertStage
"""A stage's parameters on one replica, for any ZeRO stage: the classes have the same methods."""
