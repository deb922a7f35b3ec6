"""Private parts of torch's FSDP2 (``fully_shard``) that ZeRO-3 uses;
:mod:`.fsdp_parameter` has those of a parameter.

FSDP2 accepts custom objects for its all-gather and its reduce-scatter. Here both use the mesh's
groups, so bytes are counted, failures name the ranks, and a hang report lists the ranks that wait.
With gloo the reduce-scatter sends half the bytes of gloo's own.

A unit (FSDP's parameter group) is gathered by one collective. It is a layer, or several consecutive
ones, without the modules that share a weight with another module. Modules that share a weight form a
unit together. Its weights stay gathered from forward to backward: its last module, most often the
head, needs them when the stage's memory use is highest anyway. Units of layers stay gathered as well
where the configuration keeps them (``reshard_after_forward`` = False): a backward frees them, and a
backward after it gathers them again.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.data_parallel.fsdp_parameter import FSDP, FsdpParameter
from meshwright.data_parallel.sharding import accumulation_dtype
from meshwright.data_parallel.units import ONE_LAYER, Units
from meshwright.mesh.comm import Group

PRIVATE_TORCH = {
    f"{FSDP}._fully_shard.FSDPModule._get_fsdp_state": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._lazy_init": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._root_post_backward_final_callback": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._state_ctx": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._pre_forward": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._post_forward": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._pre_forward_hook_handle": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._post_forward_hook_handle": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._fsdp_param_group": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPState._fsdp_param_groups": "2.13-2.15",
    f"{FSDP}._fsdp_state.FSDPStateContext.all_states": "2.11-2.15",
    f"{FSDP}._fsdp_state.FSDPStateContext.manual_backward_finalization_active": "2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.modules": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.device": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.comm_ctx": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.reduce_grads": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.post_backward": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup._to_sharded": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.post_forward_mesh_info": "2.11-2.15",
    f"{FSDP}._fsdp_param_group.FSDPCommContext.reduce_scatter_stream": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

# _clone_views clones such outputs
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


class _Collective:
    """Collective that FSDP calls, over a :class:`~meshwright.mesh.comm.Group`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an uninitialised buffer for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Collective):
    """All-gather. Bytes per rank: M (n-1)/n, M = bytes of the output. Blocks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._group.all_gather(output_tensor, input_tensor).wait()


class _ReduceScatter(_Collective):
    """Reduce-scatter, always a sum. Bytes per rank: M (n-1)/n, M = bytes of the input. Blocks."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._group.reduce_scatter(output_tensor, input_tensor).wait()


class FsdpUnits(NamedTuple):
    """Units of a stage: of layers, and of experts."""

    of_layers: Units = ONE_LAYER
    """Layers of each unit, and those that stay gathered."""
    modules: Sequence[nn.Module] = ()
    """Modules of experts, each a unit that is sharded over ``shard_group``, another group than its
    layer's.
    """
    shard_group: Group | None = None


class FsdpLayers:
    """Layers of a stage under FSDP: gathered and freed unit by unit,
    with collectives over the mesh's groups.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        shard: Group,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offload: bool,
        ignored: Set[nn.Parameter],
        units: FsdpUnits,
    ) -> None:
        """Shard ``layers``, which must be on the CPU, over the ranks of ``shard``,
        and move the shards to ``device``.

        It does so unit by unit, so that the device never holds the full stage. Parameters in
        ``ignored`` stay as they are. Frozen ones are sharded and gathered in ``dtype``.

        Args:
            dtype: dtype in which the weights are gathered; shards and gradients are float32
                (float64 for float64).
            offload: keep the shards in host memory and copy them to the device for each all-gather.
            units: units of layers, and the modules inside them that are sharded over another group.
        """
        self.dtype = dtype
        self.copies_gradients = offload and device.type == "cuda"
        """True if FSDP copies reduced gradients to pinned memory,
        where FullyShardedReplica accumulates them.
        """
        shard_dtype = accumulation_dtype(dtype)
        options: dict[str, Any] = {
            "mesh": shard.device_mesh(device.type),
            "ignored_params": set(ignored),
        }
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if dtype != shard_dtype:
            options["mp_policy"] = MixedPrecisionPolicy(
                dtype, shard_dtype, cast_forward_inputs=False
            )
        # innermost first: fully_shard leaves out what an inner module has sharded
        _shard_experts(units, shard_dtype, options, device)
        self._shared = _shard_sharing(layers, shard_dtype, options)
        _shard_layers(layers, units.of_layers, shard_dtype, options)
        self._root = fully_shard(layers, **options)
        modules = [module for module in layers.modules() if isinstance(module, FSDPModule)]
        _connect(modules, shard, units)
        self._prefetch(layers)
        self._state: Any = self._root._get_fsdp_state()
        self._state._lazy_init()  # otherwise done by the root's forward, which is never called
        shared = set(map(id, self._shared))
        self._of_shared = {
            id(unit) for unit in self.units() if any(id(each) in shared for each in unit.modules)
        }
        """Units of modules that share a weight, by id."""
        self._kept = [unit for unit in self.units() if unit.post_forward_mesh_info is None]
        """Units that stay gathered after a forward."""
        self.parameters: list[FsdpParameter] = []
        """Sharded parameters that are trained, unit by unit."""
        self.frozen: list[FsdpParameter] = []
        """Sharded parameters that are frozen: gathered with their unit, without a gradient."""
        self._is_ending = False
        """True while FSDP's callback at the end of a stage's backward runs."""
        self.is_reduction_due = False
        """True during a backward, or a W, whose gradients are reduced in it or right after it."""
        for unit in self.units():
            parameters = [FsdpParameter(of_torch) for of_torch in unit.fsdp_params]
            trained = [each for each in parameters if each.sharded.requires_grad]
            unit.post_backward = self._prepared(unit, trained)
            self.parameters += trained
            self.frozen += [each for each in parameters if not each.sharded.requires_grad]
        for state in self._states():
            state._root_post_backward_final_callback = self._ending(
                state._root_post_backward_final_callback
            )

    def _prefetch(self, layers: nn.Sequential) -> None:
        """Make each layer gather the next one's weights in forward,
        and those of the one before in backward.
        """
        sharded = [layer for layer in layers if isinstance(layer, FSDPModule)]
        for layer in sharded:
            layer.register_forward_hook(_clone_views, prepend=True)
        shared = set(map(id, self._shared))
        by_unit = {id(layer._get_fsdp_state()): layer for layer in reversed(sharded)}
        alone = [layer for layer in reversed(by_unit.values()) if id(layer) not in shared]
        for before, after in itertools.pairwise(alone):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])

    def _states(self) -> list[Any]:
        """Return FSDP's state of each unit, once.
        (torch 2.11 lists the state of a shared unit once per module.)
        """
        return list(dict.fromkeys(self._state._state_ctx.all_states))

    def units(self) -> Iterator[Any]:
        """Yield FSDP's parameter groups, each gathered by one collective."""
        for state in self._states():
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch 2.11 has a single group
                groups = [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)

    def set_reducing(self, reduces: bool) -> None:
        """Set whether the following backwards reduce-scatter the gradients of each unit,
        or only accumulate them.
        """
        self._root.set_requires_gradient_sync(reduces)

    def set_last_backward(self, is_last: bool) -> None:
        """Set whether the current backward is the step's last."""
        self._root.set_is_last_backward(is_last)

    def set_reshard_shared(self, reshards: bool) -> None:
        """Set whether backward frees (reshards) the weights that several modules share.

        FSDP gathers them again only if the modules ran inside one root forward. Here each layer is
        called by itself. With several micro-batches in flight the weights therefore stay gathered
        until the last backward.
        """
        for module in self._shared:
            module.set_reshard_after_backward(reshards, recurse=False)

    def free_shared(self) -> None:
        """Free (reshard) the weights that stay gathered after a forward, and had no backward since:
        those that several modules share, and those that are kept.
        """
        for unit in self._kept:
            # reshard() would keep them: the unit is still in its forward state
            unit._to_sharded()

    def wait_for_host_copies(self) -> None:
        """Block the host until the gradients of all reductions posted so far are in host memory,
        if there are any.

        FSDP copies them on its reduce-scatter stream. Alone it would wait for the copy of each
        parameter.
        """
        unit = next(self.units())
        has_gradients = any(each.sharded.grad is not None for each in self.parameters)
        if unit.device.type == "cuda" and has_gradients:
            unit.comm_ctx.reduce_scatter_stream.synchronize()

    def finish_backward(self) -> None:
        """Run FSDP's callback at the end of a backward: reduce the remaining units,
        and wait for all reductions.
        """
        context = self._state._state_ctx
        if getattr(context, "manual_backward_finalization_active", False) is None:
            # torch 2.15 expects a backward before
            context.manual_backward_finalization_active = False
        self._state._root_post_backward_final_callback()

    def _ending(self, final_callback: Callable[[], None]) -> Callable[[], None]:
        """Wrap FSDP's callback at the end of a stage's backward,
        to set ``_is_ending`` while it runs.
        """

        def run() -> None:
            self._is_ending = True
            try:
                final_callback()
            finally:
                self._is_ending = False

        return run

    def _prepared(self, unit: Any, parameters: Sequence[FsdpParameter]) -> Callable[..., None]:
        """Return a unit's post-backward hook that first gives all its parameters a gradient,
        all of one dtype.

        FSDP reduces only the gradients that exist, which may differ between replicas. A unit that
        layers share is reduced when the stage's backward has ended.
        """

        post_backward, is_shared = unit.post_backward, id(unit) in self._of_shared
        reference = weakref.ref(self)

        def is_reduction_due() -> bool:
            layers = reference()
            return layers is None or layers.is_reduction_due

        def run(*unused: Any) -> None:
            if is_shared and not self._is_ending:
                return  # its other modules' gradients are to come
            if unit.reduce_grads:
                prepare_reduction()
            else:
                sum_deferred()
            post_backward(*unused)

        def prepare_reduction() -> None:
            # all or none: a unit is gathered as one
            if all(parameter.was_gathered for parameter in parameters):
                accumulated = any(parameter.has_accumulated for parameter in parameters)
                for parameter in parameters:
                    parameter.prepare_reduction(accumulated=accumulated)

        def sum_deferred() -> None:
            for parameter in parameters:
                if parameter.was_gathered and not parameter.has_gradient:  # deferred to a W
                    parameter.sum_deferred(is_reduction_due)

        return run


def _shard_sharing(
    layers: nn.Sequential, dtype: torch.dtype, options: dict[str, Any]
) -> list[FSDPModule]:
    """Apply ``fully_shard`` to the modules that share weights, a unit of each; return them."""
    # found before fully_shard replaces the parameters
    units = list(_sharing(layers.modules(), _own_parameters))
    units += _sharing(layers, _modules_with_parameters)
    for modules in units:
        _shard_unit(modules, dtype, options, keeps=True)
    sharded = (module for modules in units for module in modules)
    return [module for module in sharded if isinstance(module, FSDPModule)]


def _shard_layers(
    layers: nn.Sequential, units: Units, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Apply ``fully_shard`` to the units of layers."""
    alone = [name for name, layer in layers.named_children() if not isinstance(layer, FSDPModule)]
    for names, keeps in units.of(alone):
        unit = [layers.get_submodule(name) for name in names]
        _shard_unit(unit, dtype, options, keeps=keeps)
        if len(unit) > 1 and isinstance(unit[0], FSDPModule):
            _hook_ends(unit[0], unit[-1])


def _hook_ends(first: FSDPModule, last: nn.Module) -> None:
    """Make a unit of consecutive layers gather before its first layer and free after its last one.

    torch's hooks for several modules count those that have run, and complete such a unit when
    another one seems to be the model's root: at any layer here, as each is called by itself.
    """
    state: Any = first._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    cast(nn.Module, first).register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    last.register_forward_hook(state._post_forward)


def _own_parameters(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters(recurse=False)}


def _modules_with_parameters(layer: nn.Module) -> set[int]:
    return {id(module) for module in layer.modules() if list(module.parameters())}


def _shard_experts(
    experts: FsdpUnits, dtype: torch.dtype, options: Mapping[str, Any], device: torch.device
) -> None:
    """Apply ``fully_shard`` to the modules of experts,
    over the ranks that hold the same experts.
    """
    if experts.shard_group is not None:
        mesh = experts.shard_group.device_mesh(device.type)
        for module in experts.modules:
            _shard_unit([module], dtype, {**options, "mesh": mesh}, keeps=False)


def _shard_unit(
    modules: list[nn.Module], dtype: torch.dtype, options: dict[str, Any], *, keeps: bool
) -> None:
    """Apply ``fully_shard`` to one unit, unless it has no weights or is sharded already;
    cast its trained weights. ``keeps``: they stay gathered after a forward.
    """
    parameters = {parameter for module in modules for parameter in module.parameters()}
    whole = {
        parameter
        for parameter in parameters
        if parameter not in options["ignored_params"] and not isinstance(parameter, DTensor)
    }
    for parameter in whole:
        wide = parameter.data.to(dtype) if parameter.requires_grad else parameter.data
        parameter.data = wide.contiguous()  # FSDP requires it
    if not parameters or isinstance(modules[0], FSDPModule):
        return
    several = len(modules) > 1
    fully_shard(modules if several else modules[0], **options, reshard_after_forward=not keeps)
    for parameter in whole:  # other code may still hold the full parameter: free its memory
        parameter.data = parameter.data.new_empty(0)


def _sharing(
    modules: Iterable[nn.Module], keys_of: Callable[[nn.Module], set[int]]
) -> Iterator[list[nn.Module]]:
    """Yield groups of modules that have a key in common: a parameter of their own, or, for layers,
    a whole module.
    """
    groups: list[tuple[list[nn.Module], set[int]]] = []
    for module in modules:
        own_keys = keys_of(module)
        group, keys = [module], set(own_keys)
        for other in [other for other in groups if other[1] & own_keys]:
            groups.remove(other)
            group, keys = other[0] + group, keys | other[1]
        groups.append((group, keys))
    yield from (group for group, _ in groups if len(group) > 1)


def _connect(modules: Iterable[FSDPModule], shard: Group, experts: FsdpUnits) -> None:
    """Set FSDP's collectives to the mesh's groups, as sums,
    and disable its implicit backward prefetch.
    """
    modules_of_experts = set(map(id, experts.modules))
    for module in modules:
        group = shard
        if experts.shard_group is not None and id(module) in modules_of_experts:
            group = experts.shard_group
        gather: Any = _Gather(group)
        reduce_scatter: Any = _ReduceScatter(group)  # Any: torch's protocols are private
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce_scatter)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # without an explicit list FSDP derives the backward order from past forwards: after a
        # micro-batch's first layer it would prefetch the last layer of another micro-batch
        module.set_modules_to_backward_prefetch([module])


def _clone_views(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """Clone an output that is a view, before FSDP hooks its all-gather for backward to it.

    The hook on a view would be lost when the next layer changes the view in place. Tensors that the
    layer passes on unchanged are not cloned: they are never views that a layer may change in place.
    """
    inputs_by_id = {id(leaf) for leaf in tree_leaves(inputs)}

    def own(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view()
        return leaf.clone() if is_view and id(leaf) not in inputs_by_id else leaf

    return tree_map(own, output)
