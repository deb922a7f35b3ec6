"""One stage as a replica among dp: what accumulates, reduces, hands shards to the optimizer and gathers the weights.

micro-batches      B0   B1   B2   B3                  forward of the next step
backward           ..   ..   ..   .#.#.#              | layer | layer | layer
buckets                             r r r -> wait     g g g ->  wait just before the layer that needs it
                                    |                 |
                   each reduced once per step, as     all-gathers posted together after the step,
                   the last backward completes it     first layer first
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from meshwright.data_parallel.buckets import Bucket, plan_buckets
from meshwright.data_parallel.sharding import Member, Sharded, Sharding, sum_over_tp
from meshwright.mesh.comm import Group
from meshwright.optimizer.host_memory import HostMemory


class Replica(Protocol):
    """What the rest of the framework knows of a stage on one replica."""

    @property
    def buckets(self) -> Sequence[Sharded]:
        """All that is trained."""

    @property
    def frozen(self) -> Sequence[Member]:
        """Parameters that are not trained: no gradient, no optimizer; the same on every replica."""

    def begin_step(self) -> None:
        """Forget the gradients."""

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Sum what the next backward of this stage completes: the step's last, or each one where the whole gradient is
        not kept. ``awaited``: the parameters that it will add gradients to; None: all. The others have theirs already.
        ``last``: it is the step's last.
        """

    def end_reducing(self) -> None:
        """That backward is done: sum what it has not reached, too."""

    def finish_reduce(self) -> None:
        """Block until every shard holds the gradient of the whole global batch, but for what ties owe each other."""

    def ready(self, layer: str) -> None:
        """Block until a layer may be computed with."""

    def ready_all(self) -> None:
        """Block until all may."""


class StageReplica:
    """The flat parameters and gradients of one stage on one replica."""

    def __init__(
        self,
        members: Sequence[Member],
        sharding: Sharding,
        tp: Group,
        *,
        bucket_bytes: int,
        keeps_gradient: bool = True,
        host: HostMemory | None = None,
        block_size: int = 1,
    ) -> None:
        self.tp = tp
        self.frozen = [member for member in members if not member.parameter.requires_grad]
        """Parameters that are not trained: no bucket, no gradient, no optimizer; the same on every replica."""
        trained = [member for member in members if member.parameter.requires_grad]
        self.buckets = [
            Bucket(kind, group, sharding, keeps_gradient=keeps_gradient, host=host, block_size=block_size)
            for kind, group in plan_buckets(trained, bucket_bytes)
        ]
        self._bucket_of_layer: dict[str, list[Bucket]] = defaultdict(list)
        self._missing: list[int] = []
        self._next_to_reduce = 0
        self._reducing = False
        self._in_last = True
        """Whether what is reduced now is of the step's last backward."""
        self._untouched: set[Tensor] = set()
        """Whose gradient has not come yet: what lies in the bucket is the last step's, or zero."""
        for index, bucket in enumerate(self.buckets):
            for number, place in enumerate(bucket.places):
                layer = place.member.layer
                if bucket not in self._bucket_of_layer[layer]:
                    self._bucket_of_layer[layer].append(bucket)
                parameter = place.member.parameter
                if bucket.same_dtype and bucket.keeps_gradient:
                    parameter.grad = bucket.gradient_views[number]
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(_accumulated, weakref.ref(self), index=index, number=number)
                )

    def _accumulated(self, parameter: Tensor, *, index: int, number: int) -> None:
        """Autograd has added a micro-batch's gradient of one parameter."""
        gradient, bucket = parameter.grad, self.buckets[index]
        if gradient is None:  # autograd has come by without one: the split backward brings it later
            return
        bucket.open_gradient()
        view = bucket.gradient_views[number]
        if gradient is not view:  # the step's first (autograd made a tensor of its own), or another dtype
            if parameter in self._untouched:
                self._untouched.remove(parameter)
                view.copy_(gradient)
            else:
                view.add_(gradient)
            parameter.grad = view if bucket.same_dtype and bucket.keeps_gradient else None
        if self._reducing:
            self._missing[index] -= 1
            self._post_ready()

    def _post_ready(self) -> None:
        """Post reductions of complete buckets, in bucket order only: every replica must post in the same order.

        Where the whole gradient is not kept, the one before is waited for: of one stage no more than one is under way,
        besides those that are being filled.
        """
        while self._next_to_reduce < len(self.buckets) and self._missing[self._next_to_reduce] <= 0:
            bucket = self.buckets[self._next_to_reduce]
            if not bucket.keeps_gradient:
                self.buckets[self._next_to_reduce - 1].wait()  # of the first: the last of the micro-batch before
                bucket.wait()  # its sum of the micro-batch before
                self._untouched |= {place.member.parameter for place in bucket.places}
            bucket.reduce(last=self._in_last)
            self._next_to_reduce += 1

    def begin_step(self) -> None:
        """Forget the gradients. The first of a step is copied over the last step's: cheaper than zeroing and adding."""
        self._untouched.clear()
        for bucket in self.buckets:
            bucket.begin_step()
            for place in bucket.places:
                place.member.parameter.grad = None
                self._untouched.add(place.member.parameter)
        self._reducing = False

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """From here on reduce each bucket as soon as the backward has completed it."""
        self._in_last = last
        self._missing = [
            sum(awaited is None or place.member.parameter in awaited for place in bucket.places)
            for bucket in self.buckets
        ]
        self._next_to_reduce = 0
        self._reducing = True
        if awaited is not None:
            self._zero_untouched(
                {place.member.parameter for bucket in self.buckets for place in bucket.places} - awaited
            )
            self._post_ready()

    def _zero_untouched(self, parameters: Set[Tensor]) -> None:
        """Those of them that have had no gradient in this step have one of zero."""
        for bucket in self.buckets:
            if bucket.keeps_gradient:  # the others begin with zeros
                for number, place in enumerate(bucket.places):
                    if place.member.parameter in self._untouched & parameters:
                        bucket.gradient_views[number].zero_()
        self._untouched -= parameters

    def end_reducing(self) -> None:
        """That backward is done. Parameters that it did not reach leave their bucket incomplete: it is reduced here all
        the same. Posts all that is left; does not wait for it."""
        self._zero_untouched(set(self._untouched))
        self._missing = [0] * len(self.buckets)
        if not self._reducing:
            self._next_to_reduce = 0
        self._post_ready()
        self._reducing = False

    def finish_reduce(self) -> None:
        """Block until every shard holds the gradient of the whole global batch.

        What tied weights owe each other is the matter of :func:`sum_ties`.
        """
        self._in_last = True
        self.end_reducing()
        for bucket in self.buckets:
            bucket.reduce_across()
        sum_over_tp(self.buckets, self.tp)

    def ready(self, layer: str) -> None:
        """Block until the weights of one layer are whole again. Free when nothing is pending."""
        for bucket in self._bucket_of_layer[layer]:
            bucket.wait()

    def ready_all(self) -> None:
        """Block until all weights are whole."""
        for bucket in self.buckets:
            bucket.wait()


def _accumulated(replica: weakref.ref[StageReplica], parameter: Tensor, *, index: int, number: int) -> None:
    """The hook of a parameter. Its replica only weakly: a parameter's hooks are in a place that Python's collector does
    not look into, so that with a strong one neither they, nor the buckets, nor the ranks' connections would ever go."""
    alive = replica()
    if alive is not None:
        alive._accumulated(parameter, index=index, number=number)


def sum_ties(buckets: Iterable[Sharded]) -> None:
    """Give all copies of each tied weight the sum of their gradients, when all stages are reduced. Blocks.

    Every rank that holds a tied weight calls it at the end of its row, not in a stage's REDUCE: the stages are done at
    different times, and one that waited for the other there could keep it from what it has yet to send. Copies of one
    rank are summed here, those of several by an all-reduce of the shard; by name, the same order on all ranks.
    """
    copies: dict[str, list[Sharded]] = defaultdict(list)
    for bucket in buckets:
        if bucket.kind.tied is not None:
            copies[bucket.kind.tied.name].append(bucket)
    for name in sorted(copies):
        first, *others = copies[name]
        assert first.kind.tied is not None
        for other in others:
            first.shard_gradient.add_(other.shard_gradient)
        first.sum_shard(first.kind.tied.ranks)
    for first, *others in copies.values():
        first.wait()
        for other in others:
            other.shard_gradient.copy_(first.shard_gradient)


def members_of(layers: nn.Sequential) -> list[tuple[str, nn.Parameter, str]]:
    """(parameter name, parameter, layer name) of each distinct parameter, in the model's order."""
    seen: set[int] = set()
    found = []
    for layer_name, layer in layers.named_children():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{layer_name}.{name}", parameter, layer_name))
    return found
