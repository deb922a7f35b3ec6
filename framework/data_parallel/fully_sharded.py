"""ZeRO-3: one stage whose weights are cut over the replicas too, by torch's ``fully_shard``, layer by layer.

    layer i            gather | forward | let go          gather | backward | let go, reduce-scatter
    each replica       its rows of every parameter, of their gradients and of the optimizer's states: 1/n of all

Each parameter is cut along its first dimension; the rows of one replica and zeros up to the longest share are a bucket
of one place, so that optimizer, checkpoints and checks see here what they see in :mod:`.buckets`. torch asks for
collectives through two doors, and ours stand in them: bytes are counted, failures name the ranks, a hang says who waits
for whom, and gloo's reduce-scatter is not an all-reduce.
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
    Member,
    Place,
    Sharded,
    Sharding,
    accumulation_dtype,
    all_reduce,
    kind_of,
    sum_over_tp,
)
from meshwright.errors import ModelError
from meshwright.mesh.comm import Group

_SUMMED_TOGETHER = 2**24
"""Elements of the gradient that go across the groups in one message, and on the device when they lie on the host."""


class _Doors:
    """What torch's two protocols for collectives have in common."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Doors):
    """``torch.distributed.fsdp``'s all-gather, by a group of ours."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._group.all_gather(output_tensor, input_tensor).wait()


class _ReduceScatter(_Doors):
    """And its reduce-scatter, which is a sum here whatever it asks for: who divides are the labels of the batch."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._group.reduce_scatter(output_tensor, input_tensor).wait()


class RowShards(Sharded):
    """One parameter of which each neighbour has some rows, as a bucket."""

    def __init__(
        self,
        member: Member,
        sharding: Sharding,
        of_torch: Any,
        shard_gradient: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``of_torch``: what FSDP knows of the parameter. ``dtype`` and ``device``: of the computation."""
        self._of_torch = of_torch
        self.dtype = dtype
        weights: DTensor = of_torch.sharded_param
        local, padded = weights.to_local(), padded_rows(of_torch)
        super().__init__(
            kind_of(member),
            sharding,
            [Place(member._replace(parameter=of_torch.sharded_param), 0, weights.numel())],
            padded.numel() * sharding.shard.size,
            master=padded,
            shard_gradient=shard_gradient,
            same_dtype=dtype == local.dtype,
            device=device,
        )
        assert weights.numel() <= self.numel, member.info.name
        # torch adds to the gradient that is there: mine, on the host too (DTensor.from_local would move it)
        weights.grad = of_torch.to_sharded_dtensor(shard_gradient[: local.numel()].view(local.shape))

    def begin_step(self) -> None:
        """My rows' gradient is zeroed for all together."""
        self.forget_local_gradient()

    def gather(self) -> None:
        """Nothing: forward does it, layer by layer."""

    def whole_weights(self) -> Tensor:
        """Gathered."""
        return self.whole(self.master).to(self.dtype)

    def load(self, weights: Tensor, master: Tensor | None) -> None:
        """My rows of what a checkpoint has."""
        start, stop = self.shard_range
        self.master.copy_((weights if master is None else master)[start:stop])

    def local_weights(self, place: Place) -> Tensor:
        """My rows."""
        return self.master

    def leaf(self, place: Place) -> Tensor:
        """What torch gathers them into; the same from the first forward on."""
        gathered: Tensor = self._of_torch.unsharded_param
        return gathered

    def gradient_view(self, place: Place) -> Tensor:
        """Of the whole parameter, while it is there."""
        gradient = self.leaf(place).grad
        return torch.zeros(0) if gradient is None else gradient

    def forget_local_gradient(self) -> None:
        """Of the whole parameter."""
        self._of_torch.unsharded_accumulated_grad = None
        if self.was_gathered:
            self._of_torch._unsharded_param.grad = None

    @property
    def was_gathered(self) -> bool:
        """Whether a forward has come by."""
        return hasattr(self._of_torch, "_unsharded_param")

    @property
    def has_accumulated(self) -> bool:
        """Whether earlier backwards have left a gradient of the whole parameter in the dtype that it is summed in."""
        return self._of_torch.unsharded_accumulated_grad is not None

    def settle(self, *, accumulated: bool) -> None:
        """Before a sum: what there is of the whole gradient in one tensor, of zeros if there is nothing.

        ``accumulated``: in the dtype that it is summed in, as others of the unit have theirs; all must be alike.
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


def padded_rows(of_torch: Any) -> Tensor:
    """All of the storage that my rows of a parameter lie in, flat: with zeros behind them up to the longest share."""
    local: Tensor = of_torch.sharded_param.to_local()
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())


class FullyShardedStage:
    """The face of :class:`~.replica.StageReplica` over layers that torch gathers and lets go."""

    def __init__(
        self,
        members: Sequence[Member],
        sharding: Sharding,
        tp: Group,
        layers: nn.Sequential,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offload: bool = False,
    ) -> None:
        """Cuts the parameters of ``layers``, which are on the CPU, and moves the shards to the device, unit by unit: it
        never holds the whole stage. ``dtype``: of the computation; kept is float32 (float64 of float64). ``offload``:
        the shards stay on the host, and are copied to the device to be gathered."""
        self.tp = tp
        self.frozen = [member for member in members if not member.parameter.requires_grad]
        """Whole everywhere: there is no gradient and no optimizer's state of them."""
        kept = accumulation_dtype(dtype)
        trained = {id(member.parameter): member for member in members if member.parameter.requires_grad}
        for member in trained.values():
            if member.parameter.dim() == 0:
                raise ModelError(
                    f"the parameter {member.info.name} is a single number: parallel.zero = 3 cuts parameters along "
                    f"their first dimension. Make it one of shape (1,), or choose parallel.zero = 2"
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
        shards = [padded_rows(of_torch) for unit in units for of_torch in unit.fsdp_params]
        self._gradient = torch.zeros(sum(map(Tensor.numel, shards)), dtype=kept, device=shards[0].device)
        """My rows' of all parameters."""
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
        """A unit is gathered as a whole: a layer, without the modules that share a weight with another; and all of
        these together. They stay from their forward to their backward: the last of them, most often the head, needs
        them where a stage holds most anyway."""
        options: dict[str, Any] = {
            "mesh": shard.device_mesh(device.type),
            "ignored_params": {member.parameter for member in self.frozen},
        }
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if dtype != kept:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept, cast_forward_inputs=False)
        for modules in [*_sharing(self._layers), *_overlapping(self._layers), *([layer] for layer in self._layers)]:
            own = {parameter for module in modules for parameter in module.parameters()}
            whole = {parameter for parameter in own if parameter.requires_grad and not isinstance(parameter, DTensor)}
            for parameter in whole:
                parameter.data = parameter.data.to(kept)
            if own and not isinstance(modules[0], FSDPModule):
                shares = len(modules) > 1
                fully_shard(modules if shares else modules[0], **options, reshard_after_forward=not shares)
                for parameter in whole:  # somebody may hold the object
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
                # without a word from us torch guesses from the forwards so far what backward will need next: after a
                # micro-batch's first layer another one's last
                module.set_modules_to_backward_prefetch([module])
        self._shared = [
            module
            for module in self._layers.modules()
            if isinstance(module, FSDPModule) and len(module._get_fsdp_state()._modules) > 1
        ]
        sharded = [layer for layer in self._layers if isinstance(layer, FSDPModule)]
        alone = [layer for layer in sharded if len(layer._get_fsdp_state()._modules) == 1]  # others come by twice
        for before, after in itertools.pairwise(alone):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        for layer in sharded:
            layer.register_forward_hook(_no_views, prepend=True)
        self._state._lazy_init()  # its forward does it, but only its layers are called

    @property
    def _state(self) -> Any:
        return self._root._get_fsdp_state()

    def _units(self) -> Iterator[Any]:
        """What torch gathers as a whole."""
        for state in self._state._state_ctx.all_states:
            groups = getattr(state, "_fsdp_param_groups", None)  # one, until torch 2.12
            yield from filter(None, [state._fsdp_param_group] if groups is None else groups)

    def begin_step(self) -> None:
        """Forget the gradients."""
        self._gradient.zero_()
        for bucket in self.buckets:
            bucket.begin_step()
        self._in_halves = False
        self._root.set_requires_gradient_sync(False)
        self._root.set_is_last_backward(False)
        self._reshard_shared(False)

    def _reshard_shared(self, reshard: bool) -> None:
        """Set whether backward lets go of the weights that modules share.

        torch gathers them again for a backward only after a forward in which the modules ran inside one root; here each
        layer is called by itself. With several micro-batches in flight they therefore stay whole until the last one's
        backward.
        """
        for module in self._shared:
            module.set_reshard_after_backward(reshard, recurse=False)

    def begin_reducing(self, awaited: Set[Tensor] | None = None, *, last: bool = True) -> None:
        """From here on reduce each layer as soon as the next backward of this stage has come by it.

        ``awaited``: given when only the weights' half of a backward comes, which torch cannot see. ``last``: torch is
        told when the step's reductions are done, and copies each to the host by itself.
        """
        self._in_halves = awaited is not None
        self._root.set_requires_gradient_sync(awaited is None)
        self._reshard_shared(last)

    def end_reducing(self) -> None:
        """That backward is done."""
        if self._in_halves:
            self._root.set_requires_gradient_sync(True)
            self._state._root_post_backward_final_callback()  # as torch's own pipelines do
        self._in_halves = False
        self._root.set_requires_gradient_sync(False)

    def finish_reduce(self) -> None:
        """Block until every replica's rows hold the gradient of the whole global batch; then the sum over tp, as in
        :meth:`.replica.StageReplica.finish_reduce`."""
        self.end_reducing()
        self._root.set_is_last_backward(True)
        self._state._root_post_backward_final_callback()  # waits for what is under way
        for part in torch.split(self._gradient, _SUMMED_TOGETHER):
            all_reduce(self._sharding.copies, part, self._device).wait()
        sum_over_tp(self.buckets, self.tp)

    def _ending(self, final_callback: Callable[[], None]) -> Callable[[], None]:
        """What torch calls when a backward is through the whole stage, so that units know."""

        def run() -> None:
            self._ends = True
            try:
                final_callback()
            finally:
                self._ends = False

        return run

    def _settled(self, unit: Any, rows: Sequence[RowShards], post_backward: Callable[..., None]) -> Callable[..., None]:
        """Before torch sums a unit's gradients: all of its parameters have one, on every replica, of one dtype. A unit
        that several layers share has it when the backward is through."""

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
        """Nothing to wait for."""

    def ready_all(self) -> None:
        """Nothing to wait for."""


warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # we see to that:


def _no_views(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """Before torch hooks its all-gather to an output: it is lost when the next layer changes a view in place. What a
    layer hands on as it came is none that can be changed so."""
    came = {id(leaf) for leaf in tree_leaves(inputs)}

    def own(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view()
        return leaf.clone() if is_view and id(leaf) not in came else leaf

    return tree_map(own, output)


def _overlapping(layers: nn.Sequential) -> Iterator[list[nn.Module]]:
    """Yield layers that hold a module with parameters in common, by group: torch gathers for whole modules."""
    found: list[tuple[list[nn.Module], set[int]]] = []
    for layer in layers:
        own = {id(module) for module in layer.modules() if any(True for _ in module.parameters())}
        together, ids = [layer], set(own)
        for other in [each for each in found if each[1] & own]:
            found.remove(other)
            together, ids = other[0] + together, ids | other[1]
        found.append((together, ids))
    yield from (together for together, _ in found if len(together) > 1)


def _sharing(layers: nn.Sequential) -> Iterator[list[nn.Module]]:
    """The modules that have a parameter object in common, group by group."""
    found: list[tuple[list[nn.Module], set[int]]] = []
    for module in layers.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        together, ids = [module], set(own)
        for other in [each for each in found if each[1] & own]:
            found.remove(other)
            together, ids = other[0] + together, ids | other[1]
        found.append((together, ids))
    yield from (together for together, _ in found if len(together) > 1)
