"""Stage under ZeRO-3 whose experts are shared over ep: two replicas of its parameters as one."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from torch import Tensor

from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.fully_sharded import FullyShardedStage
from meshwright.data_parallel.sharding import ShardedParameters, StageParameter


class BucketStage(Protocol):
    """Parameters in buckets, as :class:`~.replica.StageReplica` has them."""

    buckets: list[Bucket]
    frozen: list[StageParameter]

    def begin_step(self) -> None: ...

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None: ...

    def end_reducing(self) -> None: ...

    def finish_reduce(self) -> None: ...

    def wait_for_layer(self, layer: str) -> None: ...

    def wait_for_weights(self) -> None: ...


class ExpertStage:
    """Stage under ZeRO-3 whose experts are shared over ep: FSDP has the other weights, buckets the experts.

    The experts' gradients and optimizer state are sharded over their replicas, as with ZeRO-2. Their weights are a
    rank's E/ep experts, which no rank gathers.
    """

    def __init__(self, dense: FullyShardedStage, experts: BucketStage) -> None:
        self._parts = dense, experts
        self.buckets: Sequence[ShardedParameters] = [*dense.buckets, *experts.buckets]
        self.frozen = [*dense.frozen, *experts.frozen]

    def begin_step(self) -> None:
        """Discard the gradients of the previous step."""
        for part in self._parts:
            part.begin_step()

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Start to reduce gradients as the next backward completes them; see :mod:`.replica`."""
        for part in self._parts:
            part.begin_reducing(awaited, last=last)

    def end_reducing(self) -> None:
        """Post the reductions that are left after the backward."""
        for part in self._parts:
            part.end_reducing()

    def finish_reduce(self) -> None:
        """Block until every shard holds the gradient of the global batch."""
        for part in self._parts:
            part.finish_reduce()

    def wait_for_layer(self, layer: str) -> None:
        """Block until the all-gathered weights of one layer are complete."""
        self._parts[1].wait_for_layer(layer)

    def wait_for_weights(self) -> None:
        """Block until the weights of all layers are complete."""
        self._parts[1].wait_for_weights()
