"""Stage under ZeRO-3 with expert parallelism, whose experts have their own set of replicas.

dense weights      dp x cp ranks hold copies, in shards of shard_factor
experts            dp x cp x tp / ep ranks hold copies, in shards of gcd(shard_factor, copies); under ZeRO-3 they are
                   FSDP units of their own if the shards divide a rank's number of experts, else in
                   buckets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor, nn

from meshwright.data_parallel.fully_sharded import FullyShardedReplica
from meshwright.data_parallel.replica import BucketReplica, Replica
from meshwright.data_parallel.sharding import StageParameter
from meshwright.data_parallel.units import Units
from meshwright.mesh.comm import Group


class ExpertReplica(Replica):
    """Replica of a stage under ZeRO-3 with expert parallelism: FSDP holds the dense weights,
    buckets hold the experts.

    The experts' gradients and optimizer state are sharded over their replicas, as with ZeRO-2. Each
    rank keeps the full weights of its E/ep experts.
    """

    def __init__(self, dense: FullyShardedReplica, experts: BucketReplica) -> None:
        self._dense, self._experts = dense, experts
        self.buckets = [*dense.buckets, *experts.buckets]
        self.frozen = [*dense.frozen, *experts.frozen]
        self.frozen_shards = dense.frozen_shards

    def begin_step(self) -> None:
        """Discard the gradients of the previous step."""
        self._dense.begin_step()
        self._experts.begin_step()

    def reduce_during_backward(
        self, awaited: Set[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Make the next backward reduce gradients as it completes them; see :class:`Replica`."""
        self._dense.reduce_during_backward(awaited, last=last)
        self._experts.reduce_during_backward(awaited, last=last)

    def reduce_remaining(self) -> None:
        """Post the reductions that are left after the backward."""
        self._dense.reduce_remaining()
        self._experts.reduce_remaining()

    def finish_reduction(self) -> None:
        """Block until every shard holds the gradient of the global batch."""
        self._dense.finish_reduction()
        self._experts.finish_reduction()

    def wait_for_layer(self, layer: str) -> None:
        """Block until the experts of one layer are complete; FSDP gathers the dense weights."""
        self._experts.wait_for_layer(layer)

    def wait_for_weights(self) -> None:
        """Block until the experts of all layers are complete."""
        self._experts.wait_for_weights()


def fully_sharded_replica(
    members: Sequence[StageParameter],
    layers: nn.Sequential,
    shard_group: Group,
    device: torch.device,
    *,
    offload: bool,
    units: Units,
    make_buckets: Callable[[list[StageParameter]], BucketReplica],
) -> Replica:
    """Shard the parameters of a stage under ZeRO-3; see :class:`FullyShardedReplica`.

    ``make_buckets``: function that puts the experts in buckets if the shards do not divide their
        number on a rank.
    """
    experts = [member for member in members if member.info.sliced_over == "ep"]
    in_buckets = [] if all(map(_is_divided, experts)) else experts
    in_fsdp = [m for m in members if not (in_buckets and m.info.sliced_over == "ep")]
    fully_sharded = FullyShardedReplica(
        in_fsdp,
        shard_group,
        layers,
        members[0].parameter.dtype,
        device,
        offload=offload,
        units=units,
    )
    if not in_buckets:
        return fully_sharded
    for member in in_buckets:  # FSDP has moved only its own parameters
        member.parameter.data = member.parameter.data.to(device)
    return ExpertReplica(fully_sharded, make_buckets(in_buckets))


def _is_divided(member: StageParameter) -> bool:
    """Return whether the shards of experts divide the number of experts on a rank."""
    num_shards = member.holders.shard_group.size
    return num_shards > 1 and member.parameter.shape[0] % num_shards == 0
