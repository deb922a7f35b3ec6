"""Expert weights among the parameters of a stage. With ep > 1 they have their own set of replicas.

dense weights      dp x cp ranks hold copies, in shards of shard_factor
experts            dp x cp x tp / ep ranks hold copies, in shards of gcd(shard_factor, copies); under ZeRO-3 they are
                   FSDP units of their own if the shards divide a rank's number of experts, else in buckets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.fully_sharded import FullyShardedStage
from meshwright.data_parallel.sharding import ShardedParameters, Sharding, StageParameter
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh


class StageSharding(NamedTuple):
    """Shardings of a stage's parameters: dense and expert weights have different replicas."""

    dense: Sharding
    """Over the dp x cp replicas."""
    experts: Sharding
    """Over the dp x cp x tp / ep ranks with the same experts; for parameters that are sliced over ep."""

    def of(self, member: StageParameter) -> Sharding:
        """Return the sharding of a parameter."""
        return self.experts if member.info.is_expert else self.dense


def open_sharding(mesh: Mesh, shard_factor: int, expert_shard_factor: int) -> StageSharding:
    """Make the groups of a stage's parameters. Collective over all ranks; blocks.

    Args:
        shard_factor: number of shards of the optimizer state; 1: every replica holds all of it.
        expert_shard_factor: the same for the experts; ignored with ep = 1.
    """
    of_experts = expert_shard_factor if mesh.ep.size > 1 else 1
    return StageSharding(
        Sharding(*mesh.split(mesh.replicas, shard_factor)), Sharding(*mesh.split(mesh.expert_replicas, of_experts))
    )


class BucketStage(Protocol):
    """Interface of :class:`~.replica.StageReplica`, parameters in buckets."""

    buckets: list[Bucket]
    frozen: list[StageParameter]
    frozen_shards: Sequence[ShardedParameters]

    def begin_step(self) -> None: ...

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None: ...

    def end_reducing(self) -> None: ...

    def finish_reduce(self) -> None: ...

    def wait_for_layer(self, layer: str) -> None: ...

    def wait_for_weights(self) -> None: ...


class ExpertStage:
    """Stage under ZeRO-3 with expert parallelism: FSDP holds the dense weights, buckets hold the experts.

    The experts' gradients and optimizer state are sharded over their replicas, as with ZeRO-2. Each rank keeps the full
    weights of its E/ep experts.
    """

    def __init__(self, dense: FullyShardedStage, experts: BucketStage) -> None:
        self._parts = dense, experts
        self.buckets: Sequence[ShardedParameters] = [*dense.buckets, *experts.buckets]
        self.frozen = [*dense.frozen, *experts.frozen]
        self.frozen_shards: Sequence[ShardedParameters] = [*dense.frozen_shards, *experts.frozen_shards]

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


def fully_sharded_stage(
    members: Sequence[StageParameter],
    layers: nn.Sequential,
    sharding: StageSharding,
    tp: Group,
    device: torch.device,
    *,
    offload: bool,
    make_buckets: Callable[[list[StageParameter]], BucketStage],
) -> FullyShardedStage | ExpertStage:
    """Shard the parameters of a stage under ZeRO-3; see :class:`FullyShardedStage`.

    ``make_buckets``: function that puts the experts in buckets if the shards do not divide their number on a rank.
    """
    shards = sharding.experts.shard.size
    is_sharded = shards > 1 and not any(m.parameter.shape[0] % shards for m in members if m.info.is_expert)
    dense = [member for member in members if not member.info.is_expert or is_sharded]
    of_experts = [member for member in members if member.info.is_expert and not is_sharded]
    dtype = members[0].parameter.dtype
    fully = FullyShardedStage(dense, (sharding.dense, sharding.experts), tp, layers, dtype, device, offload=offload)
    for member in of_experts:
        member.parameter.data = member.parameter.data.to(device)
    return ExpertStage(fully, make_buckets(of_experts)) if of_experts else fully
