"""ZeRO-3: a stage whose weights are sharded over the replicas too, layer by layer, by torch's ``fully_shard``.

    layer i            gather | forward | free            gather | backward | free, reduce-scatter
    each replica       its rows of every parameter, of their gradients and of the optimizer state: 1/n of all

Each parameter is cut along its first dim. The rows of one replica, zero-padded to the longest share, form a bucket of
one slot. Optimizer, checkpoints and checks therefore see the same interface as in :mod:`.buckets`.

Frozen weights, such as the base of adapters, are sharded, gathered and freed with their layer. They have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor, nn

from meshwright.data_parallel.fsdp import FsdpLayers
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

_SUMMED_TOGETHER = 2**24
"""Elements of the gradient per all-reduce across shard groups; bounds the device copy of a gradient in host memory."""


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
        self._parameter, self._free_shared = parameter, layers.free_shared
        slot = BucketSlot(member._replace(parameter=parameter.sharded), 0, parameter.sharded.numel())
        super().__init__([slot], sharding, parameter.padded_rows.numel() * sharding.shard.size, layers.dtype, device)
        assert slot.stop <= self.numel, member.info.name
        self.master = parameter.padded_rows
        self.shard_gradient = shard_gradient

    def accumulate_in_place(self) -> None:
        """Make FSDP add this rank's gradient to :attr:`shard_gradient`, on the device that reduces."""
        self._parameter.set_gradient(self.shard_gradient)

    def add_from_host(self) -> None:
        """Add the gradient that FSDP has copied to host memory."""
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
        """Return the gradient of the full parameter in its shape, or an empty tensor when there is none."""
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
        sharding: Sharding,
        tp: Group,
        layers: nn.Sequential,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offload: bool = False,
    ) -> None:
        """Shard ``members``, parameters of ``layers``, which must be on the CPU, and move the shards to ``device``.

        Args:
            dtype: dtype of the computation. The shards are float32 (float64 for float64).
            offload: keep the shards in host memory and copy them to the device for each all-gather.
        """
        self.tp = tp
        self._sharding = sharding
        self._device = device
        _check_dims(member for member in members if member.parameter.requires_grad)
        self.frozen = [member for member in members if member.parameter.dim() == 0]
        """Frozen numbers, which have no dim to cut: whole on every replica."""
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
        self.fsdp = FsdpLayers(layers, sharding.shard, dtype, device, offload=offload, ignored=ignored)
        sizes = [parameter.padded_rows.numel() for parameter in self.fsdp.parameters]
        place = torch.device("cpu") if offload else device
        self._gradient = torch.zeros(sum(sizes), dtype=accumulation_dtype(dtype), device=place)
        """Flat gradient of this rank's rows of all parameters."""
        gradients = torch.split(self._gradient, sizes)
        self.buckets = [
            RowShards(parameter, by_key[parameter.key], sharding, gradient, self.fsdp, device)
            for parameter, gradient in zip(self.fsdp.parameters, gradients, strict=True)
        ]
        without = self._gradient.new_empty(0)
        self.frozen_shards: list[ShardedParameters] = [
            RowShards(parameter, by_key[parameter.key], sharding, without, self.fsdp, device)
            for parameter in self.fsdp.frozen
        ]
        """Weights that are not trained, sharded as the others."""
        assert len(self.buckets) + len(self.frozen_shards) == len(sharded)
        for bucket in () if self.fsdp.copies_gradients else self.buckets:
            bucket.accumulate_in_place()
        self._in_halves = False
        """True while the weight half of a split backward (W) follows, which FSDP's hooks cannot see."""

    def begin_step(self) -> None:
        """Zero the gradients, and turn off gradient reduction until :meth:`begin_reducing`."""
        self._gradient.zero_()
        for bucket in self.buckets:
            bucket.begin_step()
        self._in_halves = False
        self.fsdp.set_reducing(False)
        self.fsdp.set_last_backward(False)
        self.fsdp.set_reshard_shared(False)

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Start to reduce-scatter each layer's gradient as soon as the next backward of this stage has computed it.

        Args:
            awaited: given when only the weight half of a backward (W) follows.
            last: the step's last backward, which frees the shared weights.
        """
        self._add_from_host()
        self._in_halves = awaited is not None
        self.fsdp.set_reducing(awaited is None)
        self.fsdp.set_reshard_shared(last)

    def end_reducing(self) -> None:
        """Finish the reductions of a backward, and turn off gradient reduction until :meth:`begin_reducing`."""
        if self._in_halves:
            self.fsdp.set_reducing(True)
            self.fsdp.finish_backward()
        self._in_halves = False
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
        for part in torch.split(self._gradient, _SUMMED_TOGETHER):
            _all_reduce(self._sharding.copies, part, self._device).wait()
        sum_over_tp(self.buckets, self.tp)

    def _add_from_host(self) -> None:
        """Add the gradients of the last reducing backward, if they are in host memory. Blocks the host once.

        NOTE [offloaded gradients]: FSDP's own accumulation in host memory copies each parameter with a wait, because
        the sum needs the copy. Without a gradient to add to, it copies into pinned memory and goes on. On a CPU nothing
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
    """Raise :class:`ModelError` for a parameter without a first dim to cut."""
    for member in members:
        if member.parameter.dim() == 0:
            raise ModelError(
                "MW-DP-001",
                f"the parameter {member.info.name} is a single number: parallel.zero = 3 cuts parameters along "
                f"their first dimension. Make it one of shape (1,), or choose parallel.zero = 2",
            )


def _all_reduce(group: Group, tensor: Tensor, device: torch.device) -> CollectiveHandle:
    """Post an all-reduce (sum) of ``tensor`` over ``group``, in place. Does not block.

    A tensor in host memory is reduced through a copy on ``device``, which has the network connection. Bytes on the wire
    per rank: 2 m (n-1)/n, m = bytes of the tensor.
    """
    if group.size == 1 or tensor.device.type == device.type:
        return group.all_reduce(tensor)
    on_device = tensor.to(device)
    return group.all_reduce(on_device, finish=lambda: tensor.copy_(on_device))
