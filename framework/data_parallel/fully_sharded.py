"""ZeRO-3: a stage whose weights are sharded over the replicas too, layer by layer, by torch's ``fully_shard``.

    layer i            gather | forward | free            gather | backward | free, reduce-scatter
    each replica       its rows of every parameter, of their gradients and of the optimizer state: 1/n of all

Each parameter is cut along its first dim. The rows of one replica, zero-padded to the longest share, form a bucket of
one place. Optimizer, checkpoints and checks therefore see the same interface as in :mod:`.buckets`.

FSDP2 accepts custom objects for its all-gather and its reduce-scatter. Here both use the mesh's groups, so bytes are
counted, failures name the ranks, and a hang report lists the ranks that wait. With gloo it is a real reduce-scatter
instead of an all-reduce.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.data_parallel.sharding import (
    BucketSlot,
    ShardedParameters,
    Sharding,
    StageParameter,
    accumulation_dtype,
    all_reduce,
    kind_of,
    sum_over_tp,
)
from meshwright.errors import ModelError
from meshwright.mesh.comm import Group

_SUMMED_TOGETHER = 2**24
"""Elements of the gradient per all-reduce across shard groups; bounds the device copy of a gradient in host memory."""


class _FsdpCollective:
    """Common base of the objects that run FSDP's collectives over a :class:`~meshwright.mesh.comm.Group`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an uninitialised buffer for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_FsdpCollective):
    """All-gather for FSDP over a mesh group. Bytes per rank: M (n-1)/n, M = bytes of the output. Blocks."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._group.all_gather(output_tensor, input_tensor).wait()


class _ReduceScatter(_FsdpCollective):
    """Reduce-scatter for FSDP. Always sums; averaging happens once, by label count, in the loss scale.

    Bytes per rank: M (n-1)/n, M = bytes of the input. Blocks.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._group.reduce_scatter(output_tensor, input_tensor).wait()


class RowShards(ShardedParameters):
    """One parameter as a bucket, sharded by rows over the ranks of the shard group."""

    def __init__(
        self,
        member: StageParameter,
        sharding: Sharding,
        of_torch: Any,
        shard_gradient: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Wrap an FSDP parameter.

        Args:
            of_torch: torch's private ``FSDPParam`` of the parameter.
            shard_gradient: flat, zero-padded gradient of this rank's rows; FSDP accumulates into it.
            dtype: dtype of the computation, in which the weights are gathered.
            device: device of the computation.
        """
        self._of_torch = of_torch
        self.dtype = dtype
        weights: DTensor = of_torch.sharded_param
        local, padded = weights.to_local(), padded_shard(of_torch)
        super().__init__(
            kind_of(member),
            sharding,
            [BucketSlot(member._replace(parameter=of_torch.sharded_param), 0, weights.numel())],
            padded.numel() * sharding.shard.size,
            master=padded,
            shard_gradient=shard_gradient,
            same_dtype=dtype == local.dtype,
            device=device,
        )
        assert weights.numel() <= self.numel, member.info.name
        # FSDP adds to an existing gradient: this one, on the host too (DTensor.from_local would move it)
        weights.grad = of_torch.to_sharded_dtensor(shard_gradient[: local.numel()].view(local.shape))

    def begin_step(self) -> None:
        """Discard the full gradient. The stage zeroes the shard gradients of all parameters at once."""
        self.forget_local_gradient()

    def gather(self) -> None:
        """Skip this step: FSDP gathers the weights during forward, layer by layer."""

    def whole_weights(self) -> Tensor:
        """All-gather the full flat weights (numel,), cast to the computation dtype. Collective over the shard group."""
        return self.whole(self.master).to(self.dtype)

    def load(self, weights: Tensor, master: Tensor | None) -> None:
        """Copy this rank's rows from full flat tensors (numel,) into the master weights."""
        start, stop = self.shard_range
        self.master.copy_((weights if master is None else master)[start:stop])

    def local_weights(self, place: BucketSlot) -> Tensor:
        """Return this rank's rows, flat, in the master dtype and with padding."""
        return self.master

    def leaf(self, place: BucketSlot) -> Tensor:
        """Return FSDP's unsharded parameter; it is the same object from the first forward on."""
        gathered: Tensor = self._of_torch.unsharded_param
        return gathered

    def gradient_view(self, place: BucketSlot) -> Tensor:
        """Return the gradient of the full parameter in its shape, or an empty tensor when there is none."""
        gradient = self.leaf(place).grad
        return torch.zeros(0) if gradient is None else gradient

    def forget_local_gradient(self) -> None:
        """Discard the gradient of the full parameter, the accumulated one included."""
        self._of_torch.unsharded_accumulated_grad = None
        if self.was_gathered:
            self._of_torch._unsharded_param.grad = None

    @property
    def was_gathered(self) -> bool:
        """True once a forward has gathered the parameter."""
        return hasattr(self._of_torch, "_unsharded_param")

    @property
    def has_accumulated(self) -> bool:
        """True when earlier backwards left a gradient of the full parameter in the reduction dtype."""
        return self._of_torch.unsharded_accumulated_grad is not None

    def settle(self, *, accumulated: bool) -> None:
        """Prepare the full gradient for a reduction: one tensor, of zeros if there was no gradient.

        All gradients of a unit must have one dtype.

        Args:
            accumulated: convert it to the reduction dtype, because another parameter of the unit has its gradient
                there.
        """
        of_torch = self._of_torch
        parameter = of_torch._unsharded_param
        if parameter.grad is None and not self.has_accumulated:
            parameter.grad = torch.zeros(of_torch._orig_size, dtype=parameter.dtype, device=parameter.device)
        if accumulated:
            if self.has_accumulated and parameter.grad is not None:
                of_torch.unsharded_accumulated_grad += parameter.grad
                parameter.grad = None
            of_torch.to_accumulated_grad_if_needed()


def padded_shard(of_torch: Any) -> Tensor:
    """Return the full storage of this rank's rows as a flat tensor, zero-padded to the longest share."""
    local: Tensor = of_torch.sharded_param.to_local()
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())


class FullyShardedStage:
    """One stage under ZeRO-3, with the interface of :class:`~.replica.Replica`; FSDP gathers and frees its weights."""

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
        """Shard the parameters of ``layers``, which must be on the CPU, and move the shards to ``device``.

        It does so unit by unit, so that the device never holds the full stage.

        Args:
            dtype: dtype of the computation. The shards are float32 (float64 for float64).
            offload: keep the shards in host memory and copy them to the device for each all-gather.
        """
        self.tp = tp
        self.frozen = [member for member in members if not member.parameter.requires_grad]
        """Parameters that are not trained: full on every replica, without gradient or optimizer state."""
        kept = accumulation_dtype(dtype)
        trained = {id(member.parameter): member for member in members if member.parameter.requires_grad}
        for member in trained.values():
            if member.parameter.dim() == 0:
                raise ModelError(
                    "MW-DP-001",
                    f"the parameter {member.info.name} is a single number: parallel.zero = 3 cuts parameters along "
                    f"their first dimension. Make it one of shape (1,), or choose parallel.zero = 2",
                )
        places = {
            (id(module), name): trained[id(parameter)]
            for module in layers.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in trained
        }
        self._layers = layers
        for member in self.frozen:
            member.parameter.data = member.parameter.data.to(device)
        self._shard(sharding.shard, dtype, kept, device, offload)
        units = list(self._units())
        shards = [padded_shard(of_torch) for unit in units for of_torch in unit.fsdp_params]
        self._gradient = torch.zeros(sum(map(Tensor.numel, shards)), dtype=kept, device=shards[0].device)
        """Flat gradient of this rank's rows of all parameters."""
        gradients = iter(torch.split(self._gradient, [shard.numel() for shard in shards]))
        self.buckets: list[RowShards] = []
        for unit in units:
            rows = []
            for of_torch in unit.fsdp_params:
                place = of_torch._module_info
                member = places[id(place.module), place.param_name]
                rows.append(RowShards(member, sharding, of_torch, next(gradients), dtype, device))
            unit.post_backward = self._settled(unit, rows, unit.post_backward)
            self.buckets += rows
        assert len(self.buckets) == len(trained)
        for state in self._state._state_ctx.all_states:
            state._root_post_backward_final_callback = self._ending(state._root_post_backward_final_callback)
        self._ends = False
        self._sharding = sharding
        self._device = device
        self._in_halves = False

    def _shard(self, shard: Group, dtype: torch.dtype, kept: torch.dtype, device: torch.device, offload: bool) -> None:
        """Apply ``fully_shard`` to the layers and set FSDP's collectives, reduction and prefetch.

        FSDP gathers a unit at a time. A unit is a layer without the modules that share a weight with another module.
        Each group of modules that share a weight forms a unit of its own. Its weights stay gathered from forward to
        backward: its last module, most often the head, needs them when the stage's memory use is highest anyway.
        """
        options: dict[str, Any] = {
            "mesh": shard.device_mesh(device.type),
            "ignored_params": {member.parameter for member in self.frozen},
        }
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if dtype != kept:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept, cast_forward_inputs=False)
        for modules in [
            *_modules_sharing_parameters(self._layers),
            *_layers_sharing_modules(self._layers),
            *([layer] for layer in self._layers),
        ]:
            own = {parameter for module in modules for parameter in module.parameters()}
            whole = {parameter for parameter in own if parameter.requires_grad and not isinstance(parameter, DTensor)}
            for parameter in whole:
                parameter.data = parameter.data.to(kept)
            if own and not isinstance(modules[0], FSDPModule):
                shares = len(modules) > 1
                fully_shard(modules if shares else modules[0], **options, reshard_after_forward=not shares)
                for parameter in whole:  # other code may still hold the object
                    parameter.data = parameter.data.new_empty(0)
        root = fully_shard(self._layers, **options)
        assert isinstance(root, FSDPModule)
        self._root = root
        gather: Any = _Gather(shard)
        reduce_scatter: Any = _ReduceScatter(shard)  # torch's protocols for the two are private
        for module in self._layers.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce_scatter)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # without an explicit list FSDP derives the backward order from past forwards: after a micro-batch's
                # first layer it would prefetch the last layer of another micro-batch
                module.set_modules_to_backward_prefetch([module])
        self._shared = [
            module
            for module in self._layers.modules()
            if isinstance(module, FSDPModule) and len(module._get_fsdp_state()._modules) > 1
        ]
        sharded = [layer for layer in self._layers if isinstance(layer, FSDPModule)]
        alone = [layer for layer in sharded if len(layer._get_fsdp_state()._modules) == 1]  # shared units come up twice
        for before, after in itertools.pairwise(alone):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        for layer in sharded:
            layer.register_forward_hook(_clone_views, prepend=True)
        self._state._lazy_init()  # the root's forward would do it, but only its layers are called

    @property
    def _state(self) -> Any:
        return self._root._get_fsdp_state()

    def _units(self) -> Iterator[Any]:
        """Yield FSDP's parameter groups, each gathered by one collective."""
        for state in self._state._state_ctx.all_states:
            groups = getattr(state, "_fsdp_param_groups", None)  # one, until torch 2.12
            yield from filter(None, [state._fsdp_param_group] if groups is None else groups)

    def begin_step(self) -> None:
        """Zero the gradients, and turn off gradient reduction until :meth:`begin_reducing`."""
        self._gradient.zero_()
        for bucket in self.buckets:
            bucket.begin_step()
        self._in_halves = False
        self._root.set_requires_gradient_sync(False)
        self._root.set_is_last_backward(False)
        self._reshard_shared(False)

    def _reshard_shared(self, reshard: bool) -> None:
        """Set whether backward frees (reshards) the weights that several modules share.

        FSDP gathers them again for a backward only if the modules ran inside one root forward. Here each layer is
        called by itself. With several micro-batches in flight the weights therefore stay gathered until the last
        backward.
        """
        for module in self._shared:
            module.set_reshard_after_backward(reshard, recurse=False)

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """Start to reduce-scatter each layer's gradient as soon as the next backward of this stage has computed it.

        Args:
            awaited: given when only the weight half of a backward (W) follows, which FSDP's hooks cannot see.
            last: the step's last backward, which frees the shared weights. FSDP copies gradients to the host by itself.
        """
        self._in_halves = awaited is not None
        self._root.set_requires_gradient_sync(awaited is None)
        self._reshard_shared(last)

    def end_reducing(self) -> None:
        """Finish the reductions of a backward, and turn off gradient reduction until :meth:`begin_reducing`."""
        if self._in_halves:
            self._root.set_requires_gradient_sync(True)
            self._state._root_post_backward_final_callback()  # as torch.distributed.pipelining does
        self._in_halves = False
        self._root.set_requires_gradient_sync(False)

    def finish_reduce(self) -> None:
        """Block until this rank's rows hold the gradient of the global batch.

        All-reduces them across the shard groups, 2 m (r-1)/r bytes per rank for m bytes and r copies. Then all-reduces
        them over tp, as :meth:`.replica.StageReplica.finish_reduce` does.
        """
        self.end_reducing()
        self._root.set_is_last_backward(True)
        self._state._root_post_backward_final_callback()  # waits for reductions in flight
        for part in torch.split(self._gradient, _SUMMED_TOGETHER):
            all_reduce(self._sharding.copies, part, self._device).wait()
        sum_over_tp(self.buckets, self.tp)

    def _ending(self, final_callback: Callable[[], None]) -> Callable[[], None]:
        """Wrap FSDP's callback at the end of a stage's backward, so that units see that the backward has ended."""

        def run() -> None:
            self._ends = True
            try:
                final_callback()
            finally:
                self._ends = False

        return run

    def _settled(self, unit: Any, rows: Sequence[RowShards], post_backward: Callable[..., None]) -> Callable[..., None]:
        """Wrap a unit's post-backward hook: before a reduction, all its parameters get a gradient of one dtype.

        FSDP reduces only the gradients that exist, and the replicas must agree. A unit that several layers share is
        reduced when the stage's backward has ended.
        """

        def run(*unused: Any) -> None:
            if len(unit.modules) > 1 and not self._ends:
                return
            if unit.reduce_grads and all(row.was_gathered for row in rows):
                accumulated = any(row.has_accumulated for row in rows)
                for row in rows:
                    row.settle(accumulated=accumulated)
            post_backward(*unused)

        return run

    def ready(self, layer: str) -> None:
        """Return at once: FSDP gathers a layer's weights in the layer's own forward."""

    def ready_all(self) -> None:
        """Return at once, as :meth:`ready` does."""


warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # _no_views clones such outputs


def _clone_views(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """Clone an output that is a view, before FSDP hooks its all-gather for backward to it.

    The hook on a view would be lost when the next layer changes the view in place. Tensors that the layer passes on
    unchanged are not cloned: they are never views that a layer may change in place.
    """
    came = {id(leaf) for leaf in tree_leaves(inputs)}

    def own(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view()
        return leaf.clone() if is_view and id(leaf) not in came else leaf

    return tree_map(own, output)


def _layers_sharing_modules(layers: nn.Sequential) -> Iterator[list[nn.Module]]:
    """Yield groups of layers that share a module with parameters, because FSDP gathers whole modules."""
    found: list[tuple[list[nn.Module], set[int]]] = []
    for layer in layers:
        own = {id(module) for module in layer.modules() if any(True for _ in module.parameters())}
        together, ids = [layer], set(own)
        for other in [each for each in found if each[1] & own]:
            found.remove(other)
            together, ids = other[0] + together, ids | other[1]
        found.append((together, ids))
    yield from (together for together, _ in found if len(together) > 1)


def _modules_sharing_parameters(layers: nn.Sequential) -> Iterator[list[nn.Module]]:
    """Yield groups of modules that share a parameter object."""
    found: list[tuple[list[nn.Module], set[int]]] = []
    for module in layers.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        together, ids = [module], set(own)
        for other in [each for each in found if each[1] & own]:
            found.remove(other)
            together, ids = other[0] + together, ids | other[1]
        found.append((together, ids))
    yield from (together for together, _ in found if len(together) > 1)
