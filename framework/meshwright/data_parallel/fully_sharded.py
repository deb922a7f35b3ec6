"""ZeRO-3: a stage whose weights are sharded over the replicas too, layer by layer, by torch's ``fully_shard``.

    layer i            gather | forward | free            gather | backward | free, reduce-scatter
    each replica       its rows of every parameter, of their gradients and of the optimizer state: 1/n of all

Each parameter is sharded along its first dim. The rows of one replica, zero-padded to the size of the largest shard,
form a bucket of one slot. Optimizer, checkpoints and checks therefore use the same interface as in :mod:`.buckets`.

Frozen weights, such as the base of adapters, are sharded, gathered and freed with their layer. They have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from meshwright.data_parallel.fsdp import ExpertUnits, FsdpLayers
from meshwright.data_parallel.fsdp_parameter import FsdpParameter
from meshwright.data_parallel.sharding import (
    BucketSlot,
    ShardedParameters,
    Sharding,
    StageParameter,
    accumulation_dtype,
    sum_over_tp,
)
from meshwright.errors import ModelError
from meshwright.mesh.comm import CollectiveHandle, Group

Key = tuple[int, str]
"""Identity of a parameter's module, and the parameter's name in it."""
_SUMMED_TOGETHER = 2**24
"""Elements per all-reduce across shard groups; bounds the device memory to reduce a gradient in host memory."""


class RowShards(ShardedParameters):
    """One parameter as a bucket, sharded by rows over the ranks of the shard group."""

    def __init__(
        self,
        parameter: FsdpParameter,
        member: StageParameter,
        sharding: Sharding,
        shard_gradient: Tensor,
        layers: FsdpLayers,
        device: torch.device,
    ) -> None:
        """Wrap an FSDP parameter of ``layers``.

        Args:
            shard_gradient: flat, zero-padded gradient of this rank's rows.
            device: device of the computation.
        """
        self._parameter, self._free_shared, self.key = parameter, layers.free_shared, parameter.key
        slot = BucketSlot(member._replace(parameter=parameter.sharded), 0, parameter.sharded.numel())
        super().__init__([slot], sharding, parameter.padded_rows.numel() * sharding.shard.size, layers.dtype, device)
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
        """Discard the full gradient. The stage zeroes the shard gradients of all parameters at once."""
        self._parameter.discard_full_gradient()

    def gather(self) -> None:
        """Free shared weights that are still gathered: FSDP gathers during forward, layer by layer."""
        self._free_shared()

    def leaf(self, slot: BucketSlot) -> Tensor:
        """Return FSDP's unsharded parameter; it is the same object from the first forward on."""
        return self._parameter.unsharded

    def gradient_of(self, slot: BucketSlot) -> Tensor:
        """Return the gradient of the full parameter in its shape; an empty tensor if there is none."""
        gradient = self._parameter.unsharded.grad
        return torch.zeros(0) if gradient is None else gradient

    def sum_shard(self, group: Group) -> None:
        """Post an all-reduce (sum) of this rank's rows of the gradient over ``group``. Does not block."""
        self.pending = _all_reduce(group, self.shard_gradient, self.device)


class FullyShardedStage:
    """One stage under ZeRO-3, with the methods of :class:`~.replica.StageReplica`; FSDP gathers its weights."""

    def __init__(
        self,
        members: Sequence[StageParameter],
        sharding: tuple[Sharding, Sharding],
        tp: Group,
        layers: nn.Sequential,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offload: bool = False,
    ) -> None:
        """Shard ``members``, parameters of ``layers``, which must be on the CPU, and move the shards to ``device``.

        Args:
            sharding: of the dense weights, and of expert weights.
            dtype: dtype of the computation. The shards are float32 (float64 for float64).
            offload: keep the shards in host memory and copy them to the device for each all-gather.
        """
        self.tp = tp
        self._device = device
        _check_dims(member for member in members if member.parameter.requires_grad)
        self.frozen = [member for member in members if member.parameter.dim() == 0]
        """Frozen scalars, which have no dim to shard: replicated."""
        sharded = {id(member.parameter): member for member in members if member.parameter.dim()}
        by_key = {
            (id(module), name): sharded[id(parameter)]
            for module in layers.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in sharded
        }
        for member in self.frozen:
            member.parameter.data = member.parameter.data.to(device)
        ignored = {parameter for parameter in layers.parameters() if id(parameter) not in sharded}
        shared = [module for module in layers.modules() if "expert_exchange" in vars(module)]
        shared = shared if any(member.info.is_expert for member in by_key.values()) else []
        experts = ExpertUnits(shared, sharding[1].shard) if shared else ExpertUnits()
        self.fsdp = FsdpLayers(
            layers, sharding[0].shard, dtype, device, offload=offload, ignored=ignored, experts=experts
        )
        self._gradients: list[tuple[Group, Tensor]] = []
        """(copies group, flat gradient of this rank's rows) of dense weights, and of experts."""
        self.buckets: list[RowShards] = []
        self.frozen_shards: list[ShardedParameters] = []
        """Frozen weights, sharded as the others."""
        empty = torch.zeros(0, dtype=accumulation_dtype(dtype), device="cpu" if offload else device)
        for is_expert, of_kind in zip((False, True), sharding, strict=True):
            rows = {key: member for key, member in by_key.items() if member.info.is_expert is is_expert}
            self._add_buckets(rows, of_kind, empty)
        order = {parameter.key: at for at, parameter in enumerate(self.fsdp.parameters)}
        self.buckets.sort(key=lambda bucket: order[bucket.key])
        assert len(self.buckets) + len(self.frozen_shards) == len(sharded)
        for bucket in () if self.fsdp.copies_gradients else self.buckets:
            bucket.accumulate_in_place()
        self._in_halves = False
        """True while only W of a split backward is left, which runs no backward that FSDP's hooks would see."""

    def _add_buckets(self, members: Mapping[Key, StageParameter], sharding: Sharding, empty: Tensor) -> None:
        """Add the buckets of one sharding, with one flat gradient tensor of the dtype and device of ``empty``."""
        trained, frozen = (
            [each for each in parameters if each.key in members]
            for parameters in (self.fsdp.parameters, self.fsdp.frozen)
        )
        if trained:
            sizes = [parameter.padded_rows.numel() for parameter in trained]
            flat = empty.new_zeros(sum(sizes))
            self._gradients.append((sharding.copies, flat))
            for each, gradient in zip(trained, torch.split(flat, sizes), strict=True):
                self.buckets.append(RowShards(each, members[each.key], sharding, gradient, self.fsdp, self._device))
        for each in frozen:
            self.frozen_shards.append(RowShards(each, members[each.key], sharding, empty, self.fsdp, self._device))

    def begin_step(self) -> None:
        """Zero the gradients, and turn off gradient reduction until :meth:`begin_reducing`."""
        for _, gradient in self._gradients:
            gradient.zero_()
        for bucket in self.buckets:
            bucket.begin_step()
        self._in_halves = self.fsdp.is_reduction_due = False
        self.fsdp.set_reducing(False)
        self.fsdp.set_last_backward(False)
        self.fsdp.set_reshard_shared(False)

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Start to reduce-scatter each layer's gradient as soon as the next backward of this stage has computed it.

        Args:
            awaited: not None if only W of a split backward follows.
            last: the step's last backward, which frees the shared weights.
        """
        self._add_from_host()
        self._in_halves, self.fsdp.is_reduction_due = awaited is not None, True
        self.fsdp.set_reducing(awaited is None)
        self.fsdp.set_reshard_shared(last)

    def end_reducing(self) -> None:
        """Finish the reductions of a backward, and turn off gradient reduction until :meth:`begin_reducing`."""
        if self._in_halves:
            self.fsdp.set_reducing(True)
            self.fsdp.finish_backward()
        self._in_halves = self.fsdp.is_reduction_due = False
        self.fsdp.set_reducing(False)

    def finish_reduce(self) -> None:
        """Block until this rank's rows hold the gradient of the global batch.

        All-reduces them across the shard groups, 2 m (r-1)/r bytes per rank for m bytes and r copies. Then all-reduces
        them over tp, as :meth:`.replica.StageReplica.finish_reduce` does.
        """
        self.end_reducing()
        self._add_from_host()
        self.fsdp.set_last_backward(True)
        self.fsdp.finish_backward()
        self._add_from_host()
        for copies, gradient in self._gradients:
            for part in torch.split(gradient, _SUMMED_TOGETHER):
                _all_reduce(copies, part, self._device).wait()
        sum_over_tp(self.buckets, self.tp)

    def _add_from_host(self) -> None:
        """Add the gradients of the last reducing backward, if they are in host memory. Blocks the host once.

        NOTE [offloaded gradients]: FSDP's own accumulation in host memory copies each parameter with a wait, because
        the sum needs the copy. Without a gradient to add to, it copies to pinned memory asynchronously. On CPU nothing
        is copied, and FSDP adds in place.
        """
        if self.fsdp.copies_gradients:
            self.fsdp.wait_for_gradients()
            for bucket in self.buckets:
                bucket.add_from_host()

    def wait_for_layer(self, layer: str) -> None:
        """Return at once: FSDP gathers a layer's weights in the layer's own forward."""

    def wait_for_weights(self) -> None:
        """Return at once, as :meth:`wait_for_layer` does."""


def _check_dims(members: Iterable[StageParameter]) -> None:
    """Raise :class:`ModelError` for a parameter without a first dim to shard, or without elements."""
    for member in members:
        if member.parameter.numel() == 0:
            raise ModelError(
                "MW-DP-002",
                f"the parameter {member.info.name} of shape {tuple(member.parameter.shape)} has no elements: "
                f"torch cannot shard it under parallel.zero = 3. Remove it, or choose parallel.zero = 2",
            )
        if member.parameter.dim() == 0:
            raise ModelError(
                "MW-DP-001",
                f"the parameter {member.info.name} is a single number: parallel.zero = 3 cuts parameters along "
                f"their first dimension. Make it one of shape (1,), or choose parallel.zero = 2",
            )


def _all_reduce(group: Group, tensor: Tensor, device: torch.device) -> CollectiveHandle:
    """Post an all-reduce (sum) of ``tensor`` over ``group``, in place. Does not block.

    A tensor in host memory is reduced through a copy on ``device``: NCCL cannot reduce host memory. Bytes on the wire
    per rank: 2 m (n-1)/n, m = bytes of the tensor.
    """
    if group.size == 1 or tensor.device.type == device.type:
        return group.all_reduce(tensor)
    on_device = tensor.to(device)
    return group.all_reduce(on_device, finish=lambda: tensor.copy_(on_device))
