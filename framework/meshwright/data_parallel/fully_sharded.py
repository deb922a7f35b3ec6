"""ZeRO-3: a stage whose weights are sharded over the replicas too, layer by layer,
by torch's ``fully_shard``.

    layer i            gather | forward | free            gather | backward | free, reduce-scatter
    each replica       its rows of every parameter, of their gradients and of the optimizer state: 1/n of all

Each parameter is sharded along its first dim. The rows of one replica, zero-padded to the size of
the largest shard, form a bucket of one slot. Optimizer, checkpoints and checks therefore use the
same interface as in :mod:`.buckets`.

Frozen weights, such as the base of adapters, are sharded, gathered and freed with their layer. They
have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from meshwright.data_parallel.fsdp import FsdpLayers, FsdpUnits
from meshwright.data_parallel.fsdp_parameter import FsdpParameter
from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.sharding import (
    BucketSlot,
    ShardedParameters,
    StageParameter,
    accumulation_dtype,
    sum_partial,
)
from meshwright.data_parallel.units import ONE_LAYER, Units
from meshwright.errors import ModelError
from meshwright.mesh.comm import CollectiveHandle, Group

Key = tuple[int, str]
"""Identity of a parameter's module, and the parameter's name in it."""
_SUMMED_TOGETHER = 2**24
"""Elements per all-reduce across shard groups;
bounds the device memory to reduce a gradient in host memory.
"""


class RowShards(ShardedParameters):
    """One parameter as a bucket, sharded by rows over the ranks of the shard group."""

    def __init__(
        self,
        parameter: FsdpParameter,
        member: StageParameter,
        shard_gradient: Tensor,
        layers: FsdpLayers,
        device: torch.device,
    ) -> None:
        """Wrap an FSDP parameter of ``layers``.

        Args:
            shard_gradient: flat, zero-padded gradient of this rank's rows.
            device: device of the computation.
        """
        self._parameter = parameter
        self._free_shared = layers.free_shared
        self.key = parameter.key
        sharded = member._replace(parameter=parameter.sharded)
        slot = BucketSlot(sharded, start=0, stop=parameter.sharded.numel())
        numel = parameter.padded_rows.numel() * member.holders.shard_group.size
        super().__init__([slot], numel, layers.dtype, device)
        assert slot.stop <= self.numel, member.info.name
        self.master = parameter.padded_rows
        self.shard_gradient = shard_gradient

    def accumulate_in_place(self) -> None:
        """Make FSDP accumulate this rank's reduced gradient directly in :attr:`shard_gradient`."""
        self._parameter.set_gradient(self.shard_gradient)

    def add_from_host(self) -> None:
        """Add the gradient that FSDP has copied to host memory to :attr:`shard_gradient`."""
        self._parameter.take_gradient(self.shard_gradient)

    def begin_step(self) -> None:
        """Discard the full gradient. The stage zeroes the shard gradients
        of all parameters at once.
        """
        self._parameter.discard_full_gradient()

    def gather(self) -> None:
        """Free shared weights that are still gathered: FSDP gathers during forward,
        layer by layer.
        """
        self._free_shared()

    def leaf(self, slot: BucketSlot) -> Tensor:
        """Return FSDP's unsharded parameter; it is the same object from the first forward on."""
        return self._parameter.unsharded

    def gradient_of(self, slot: BucketSlot) -> Tensor:
        """Return the gradient of the full parameter in its shape;
        an empty tensor if there is none.
        """
        gradient = self._parameter.unsharded.grad
        return torch.zeros(0) if gradient is None else gradient

    def sum_shard(self, group: Group) -> None:
        """Post an all-reduce (sum) of this rank's rows of the gradient over ``group``.
        Does not block.
        """
        self.pending = _all_reduce(group, self.shard_gradient, self.device)


class FullyShardedReplica(Replica):
    """Replica of a stage under ZeRO-3: FSDP gathers a layer's weights in forward and in backward,
    and reduce-scatters its gradients.
    """

    def __init__(
        self,
        members: Sequence[StageParameter],
        shard_group: Group,
        layers: nn.Sequential,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offload: bool = False,
        units: Units = ONE_LAYER,
    ) -> None:
        """Shard ``members``, parameters of ``layers``, which must be on the CPU,
        and move the shards to ``device``.

        Args:
            shard_group: replicas that shard the weights, apart from those of experts under ep.
            dtype: dtype of the computation. The shards are float32 (float64 for float64).
            offload: keep the shards in host memory and copy them to the device for each all-gather.
            units: layers that are gathered together, or stay gathered.
        """
        self._device = device
        _check_dims(member for member in members if member.parameter.requires_grad)
        sharded = [member for member in members if member.parameter.dim() > 0]
        self.frozen = [member for member in members if member.parameter.dim() == 0]
        """Frozen scalars, which have no dim to shard: replicated."""
        for member in self.frozen:
            member.parameter.data = member.parameter.data.to(device)
        # before FSDP puts parameters of its own in the modules
        members_by_key = _members_by_key(layers, sharded)
        self.fsdp = FsdpLayers(
            layers,
            shard_group,
            dtype,
            device,
            offload=offload,
            ignored=set(layers.parameters()) - {member.parameter for member in sharded},
            units=_expert_units(layers, sharded)._replace(of_layers=units),
        )
        self._gradients: list[tuple[Group, Tensor]] = []
        """(copies group, flat gradient of this rank's rows), for the parameters of each such group."""
        self.buckets: list[RowShards] = []
        self.frozen_shards: list[RowShards] = []
        """Frozen weights, sharded as the others."""
        empty = torch.zeros(0, dtype=accumulation_dtype(dtype), device="cpu" if offload else device)
        for group in dict.fromkeys(member.holders.copies_group for member in sharded):
            of_group = {k: m for k, m in members_by_key.items() if m.holders.copies_group is group}
            self._add_buckets(of_group, group, empty)
        # back in FSDP's order, which the groups have split
        position = {parameter.key: at for at, parameter in enumerate(self.fsdp.parameters)}
        self.buckets.sort(key=lambda bucket: position[bucket.key])
        assert len(self.buckets) + len(self.frozen_shards) == len(sharded)
        if not self.fsdp.copies_gradients:
            for bucket in self.buckets:
                bucket.accumulate_in_place()
        self._reduces_after_w = False
        """True while the W that reduces runs: FSDP's hooks do not see it, since no backward runs,
        so its gradients are reduced after it.
        """

    def _add_buckets(
        self, members: Mapping[Key, StageParameter], copies_group: Group, empty: Tensor
    ) -> None:
        """Add the buckets of the parameters with one copies group,
        with one flat gradient tensor of the dtype and device of ``empty``.
        """
        trained = [each for each in self.fsdp.parameters if each.key in members]
        frozen = [each for each in self.fsdp.frozen if each.key in members]
        if trained:
            sizes = [parameter.padded_rows.numel() for parameter in trained]
            flat = empty.new_zeros(sum(sizes))  # one tensor: one zeroing and few all-reduces
            self._gradients.append((copies_group, flat))
            for parameter, gradient in zip(trained, torch.split(flat, sizes), strict=True):
                member = members[parameter.key]
                self.buckets.append(RowShards(parameter, member, gradient, self.fsdp, self._device))
        for parameter in frozen:
            member = members[parameter.key]
            self.frozen_shards.append(RowShards(parameter, member, empty, self.fsdp, self._device))

    def begin_step(self) -> None:
        """Zero the gradients, and turn off gradient reduction until
        :meth:`reduce_during_backward`.
        """
        for _, gradient in self._gradients:
            gradient.zero_()
        for bucket in self.buckets:
            bucket.begin_step()
        self._stop_reducing()
        self.fsdp.set_last_backward(False)
        self.fsdp.set_reshard_shared(False)

    def _stop_reducing(self) -> None:
        self._reduces_after_w = False
        self.fsdp.is_reduction_due = False
        self.fsdp.set_reducing(False)

    def reduce_during_backward(
        self, awaited: Set[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Make the next backward reduce-scatter each layer's gradient as soon as it has computed
        it; see :class:`Replica`.

        ``awaited``: not None if only W of a split backward follows. ``last``: the step's last
            backward, which frees the shared weights.
        """
        # then FSDP has no gradient to add to: see NOTE [offloaded gradients]
        self._add_from_host()
        self._reduces_after_w = awaited is not None
        self.fsdp.is_reduction_due = True
        self.fsdp.set_reducing(not self._reduces_after_w)
        self.fsdp.set_reshard_shared(last)

    def reduce_remaining(self) -> None:
        """Finish the reductions of a backward,
        and turn off gradient reduction until :meth:`reduce_during_backward`.
        """
        if self._reduces_after_w:
            self.fsdp.set_reducing(True)
            self.fsdp.finish_backward()
        self._stop_reducing()

    def finish_reduction(self) -> None:
        """Block until this rank's rows hold the gradient of the global batch.

        All-reduces them across the shard groups, 2 m (r-1)/r bytes per rank for m bytes and r
        copies. Then all-reduces them over tp, as :class:`.replica.BucketReplica` does.
        """
        self.reduce_remaining()
        self._add_from_host()
        self.fsdp.set_last_backward(True)
        self.fsdp.finish_backward()
        self._add_from_host()
        for copies_group, gradient in self._gradients:
            for part in torch.split(gradient, _SUMMED_TOGETHER):
                _all_reduce(copies_group, part, self._device).wait()
        sum_partial(self.buckets)

    def _add_from_host(self) -> None:
        """Add the gradients of the last reducing backward, if they are in host memory.
        Blocks the host once.

        NOTE [offloaded gradients]: FSDP's own accumulation in host memory copies each parameter
        with a wait, because the sum needs the copy. Without a gradient to add to, it copies to
        pinned memory asynchronously. On CPU nothing is copied, and FSDP adds in place.
        """
        if self.fsdp.copies_gradients:
            self.fsdp.wait_for_host_copies()
            for bucket in self.buckets:
                bucket.add_from_host()

    def wait_for_layer(self, layer: str) -> None:
        """Return at once: FSDP gathers a layer's weights in the layer's own forward."""

    def wait_for_weights(self) -> None:
        """Return at once, as :meth:`wait_for_layer` does."""


def _members_by_key(
    layers: nn.Sequential, members: Iterable[StageParameter]
) -> dict[Key, StageParameter]:
    """Return the members by module and name; a parameter that modules share has several keys."""
    member_of = {member.parameter: member for member in members}
    return {
        (id(module), name): member_of[parameter]
        for module in layers.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter in member_of
    }


def _expert_units(layers: nn.Sequential, members: Iterable[StageParameter]) -> FsdpUnits:
    """Return the modules of experts that FSDP shards over a group of their own;
    none if the experts are in buckets.
    """
    experts = [member for member in members if member.info.sliced_over == "ep"]
    if not experts:
        return FsdpUnits()
    modules = [module for module in layers.modules() if "expert_exchange" in vars(module)]
    return FsdpUnits(ONE_LAYER, modules, experts[0].holders.shard_group) if modules else FsdpUnits()


def _check_dims(members: Iterable[StageParameter]) -> None:
    """Raise :class:`ModelError` for a parameter without a first dim to shard,
    or without elements.
    """
    for member in members:
        if member.parameter.numel() == 0:
            raise ModelError(
                "MW-DP-002",
                f"the parameter {member.info.name} of shape {tuple(member.parameter.shape)} has no"
                " elements: torch cannot shard it under parallel.zero = 3. Remove it, or choose"
                " parallel.zero = 2",
            )
        if member.parameter.dim() == 0:
            raise ModelError(
                "MW-DP-001",
                f"the parameter {member.info.name} is a single number: parallel.zero = 3 cuts"
                " parameters along their first dimension. Make it one of shape (1,), or choose"
                " parallel.zero = 2",
            )


def _all_reduce(group: Group, tensor: Tensor, device: torch.device) -> CollectiveHandle:
    """Post an all-reduce (sum) of ``tensor`` over ``group``, in place. Does not block.

    A tensor in host memory is reduced through a copy on ``device``: NCCL cannot reduce host memory.
    Bytes on the wire per rank: 2 m (n-1)/n, m = bytes of the tensor.
    """
    if group.size == 1 or tensor.device.type == device.type:
        return group.all_reduce(tensor)
    on_device = tensor.to(device)
    return group.all_reduce(on_device, finish=lambda: tensor.copy_(on_device))
