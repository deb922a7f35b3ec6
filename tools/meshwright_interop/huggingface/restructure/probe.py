"""A traced training forward on the meta device: finds functional dropout, other draws, and the
weights that act on sharded tensors.

Functional dropout is drawn by name, layer by layer. Where the model's own forward drops elements
between its layers, the restructured model would not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import ModelError
from meshwright.model.functional_dropout import FunctionalDropoutMode, RecordingDrawer
from meshwright_interop.huggingface.restructure.buffers import check_unchanged, versions
from meshwright_interop.huggingface.restructure.untouched import (
    check_untouched,
    untouched_dropouts,
)

DRAWS = {
    "bernoulli",
    "exponential_",
    "multinomial",
    "normal_",
    "poisson",
    "rand_like",
    "randn_like",
    "uniform_",
}
"""Functions that draw a random number for each element."""


IDS = (1, 4)
"""Samples and tokens of the forward."""


class DrawRecorder(TorchFunctionMode):
    """Function mode that records the functions which draw from the process-wide generator."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in DRAWS:
            self.draws.append(func.__name__)
        return func(*args, **(kwargs or {}))


class ProbeResult(NamedTuple):
    """Observations of the probe that matter to tensor parallelism."""

    uncut: dict[str, bool]
    """Siblings of columns with gathered output -> True if such an output is their only input."""
    per_head_modules: list[str]
    """Modules without an entry in the plan whose weights act on sharded heads,
    and are shared by all heads.
    """
    problems: list[str]
    """Reasons why weights without an entry in the plan cannot stay replicated."""
    drops_probabilities: bool = False
    """True if attention drops its probabilities by a function."""
    input_dims: Mapping[str, int] = MappingProxyType({})
    """Module -> number of dims of its first input."""
    mappings: frozenset[str] = frozenset()
    """Modules that make one tensor (B, S, D) of one (B, S, D), beside tensors of other shapes."""


class ShardedTensorTracker(TorchFunctionMode):
    """Function mode that follows tensors from a column, which tensor parallelism will shard,
    until a row reduces them.

    It records the other operands of operations on such sharded tensors::

        a weight, or a function of one weight (its float32, 1 + it)  self.weight_uses
        an activation that is replicated over tp                     self.replicated_operands: its gradient would be
                                                                     that of one shard only
        angles, masks, constants                                     not recorded
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights: dict[int, TrackedTensor] = {
            id(weight): TrackedTensor(weight, name) for name, weight in weights.items()
        }
        """Weights, and tensors computed from one weight alone, by id."""
        self.replicated: dict[int, TrackedTensor] = {}
        """Replicated activations by id, with the last weight in their computation."""
        self.sharded: dict[int, TrackedTensor] = {}
        self.weight_uses: dict[str, list[tuple[int, ...]]] = {}
        """Name of a weight -> shapes of the sharded tensors that it acts on."""
        self.replicated_operands: dict[str, str] = {}
        """Last weight of a replicated activation -> column of the sharded tensor
        that it is combined with.
        """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = list(tensors_in((args, kwargs)))
        sharded, replicated, weights = (
            [kind[id(tensor)] for tensor in operands if id(tensor) in kind]
            for kind in (self.sharded, self.replicated, self.weights)
        )
        written = args[:1] if func is Tensor.__setitem__ else ()
        if sharded:
            for weight in weights:
                self.weight_uses.setdefault(weight.name, []).extend(
                    tuple(shard.tensor.shape) for shard in sharded
                )
            self.replicated_operands |= {each.name: sharded[0].name for each in replicated}
            self._track(self.sharded, sharded[0].name, (result, written))
        elif len(weights) == len(operands) and len({weight.name for weight in weights}) == 1:
            self._track(self.weights, weights[0].name, result)
        elif replicated or weights:
            self._track(self.replicated, (weights or replicated)[-1].name, (result, written))
        return result

    def _track(self, kind: dict[int, TrackedTensor], name: str, value: Any) -> None:
        kind |= {
            id(tensor): TrackedTensor(tensor, name)
            for tensor in tensors_in(value)
            if tensor.is_floating_point()
        }

    def watch(self, name: str, module: nn.Module, kind: str) -> None:
        """Register a hook that marks the output of a column as sharded,
        and of a row as replicated.
        """

        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            added, removed = (
                (self.sharded, self.replicated)
                if kind == "column"
                else (self.replicated, self.sharded)
            )
            removed.pop(id(output), None)
            self._track(added, name, output)

        module.register_forward_hook(after)


class TrackedTensor(NamedTuple):
    """Tensor, kept alive so that its ``id`` is not reused, and the name of its weight or column."""

    tensor: Tensor
    name: str


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def structure_key(layer: nn.Module) -> str:
    """Return a description that is equal for layers that differ only in their index."""
    plain = (bool, int, float, str, type(None))
    attributes = [
        (name, attribute, value)
        for name, module in layer.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, plain) and attribute not in ("layer_idx", "layer_id", "first")
    ]
    return f"{layer} {attributes}"


def probe(
    layers: nn.Sequential,
    kinds: Mapping[str, str],
    siblings: Mapping[str, Sequence[str]],
    place: str,
    config: Any,
    attention: str | None,
) -> ProbeResult:
    """Run one training forward on meta, and return the observations.

    Of equal layers only the first one runs. Dropout modules are off, since their masks are later
    seeded by name.

    Args:
        layers: the restructured model.
        kinds: name of a planned module -> kind.
        siblings: modules with weights -> the sibling columns with gathered output.
        place: name of the model in errors.
        config: its transformers configuration, for hints in errors.
        attention: option of the builder, for a run of transformers' own model.

    Raises:
        ModelError: a function that draws from the process-wide generator: its numbers would depend
            on layout. Or functional dropout outside of the layers, or a frozen parameter that the
            forward writes.
    """
    first_of_kind: dict[str, str] = {}
    probed_layers = {
        name: first_of_kind.setdefault(structure_key(layer), name)
        for name, layer in layers.named_children()
    }
    on_meta = nn.Sequential()
    for name in dict.fromkeys(probed_layers.values()):
        on_meta.add_module(name, copy.deepcopy(layers.get_submodule(name)).to("meta").train())
    for module in (each for each in on_meta.modules() if isinstance(each, nn.Dropout)):
        module.eval()
    uncut = _record_uncut(on_meta, siblings)
    forms = _record_forms(on_meta)
    tracker, others = ShardedTensorTracker(dict(on_meta.named_parameters())), DrawRecorder()
    dropouts = DropoutsOfLayers(on_meta)
    for name, module in on_meta.named_modules():
        if kinds.get(name) in ("column", "row"):
            tracker.watch(name, module, kinds[name])
    before = versions(on_meta)
    with tracker, others, FunctionalDropoutMode(dropouts):
        has_run = _runs(on_meta)
    if not has_run:
        check_untouched(config, place, attention)
        # the layer is reported, with its reason, when the stages are cut
        return ProbeResult(uncut, [], [])
    calls = [call for name in probed_layers.values() for call in dropouts.of_layer[name]]
    _check_draws(others, dropouts, calls, place, config, attention)
    check_unchanged(on_meta, before, place)
    named = {name for name, kind in kinds.items() if kind != "replicate"}
    unplanned = {
        name: shapes
        for name, shapes in tracker.weight_uses.items()
        if name.rpartition(".")[0] not in named
    }
    per_head_modules, problems = _classify_weights(on_meta, unplanned)
    problems += [
        f"the output of {name} is replicated, and combined with the output of {column}, which its"
        " plan shards: its gradient would be that of one rank's shard"
        for name, column in tracker.replicated_operands.items()
    ]
    inner_modules = [name for name, _ in layers.named_modules() if name.partition(".")[0]]
    probed = {name: _name_in_probed_layer(name, probed_layers) for name in inner_modules}
    return ProbeResult(
        {name: uncut[_name_in_probed_layer(name, probed_layers)] for name in siblings},
        [name for name in inner_modules if probed[name] in per_head_modules],
        problems,
        any(dims == 4 for dims, _ in calls),
        {name: forms.dims[probed[name]] for name in inner_modules if probed[name] in forms.dims},
        frozenset(name for name in inner_modules if probed[name] in forms.mappings),
    )


class DropoutsOfLayers(RecordingDrawer):
    """Recorder of the functional dropouts of each layer, as (number of dims, p)."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.of_layer: dict[str, list[tuple[int, float]]] = {}
        self.without_samples: list[tuple[int, ...]] = []
        """Shapes whose dim 0 is not the one sample of the run."""
        for name, layer in layers.named_children():
            layer.register_forward_pre_hook(partial(self._begin, name))

    def _begin(self, name: str, layer: nn.Module, args: Any) -> None:
        self._current = self.of_layer[name] = []

    def kept(self, like: Tensor, shape: torch.Size, p: float) -> Tensor | None:
        self._current.append((len(shape), p))
        if shape[0] != 1:
            self.without_samples.append(tuple(shape))
        return None


def _runs(on_meta: nn.Sequential) -> bool:
    """Run the layers on token ids, and return False if they fail."""
    with torch.no_grad():
        try:
            on_meta(torch.zeros(IDS, dtype=torch.int64, device="meta"))
        except ModelError:
            raise
        except Exception:
            return False
    return True


def _record_uncut(on_meta: nn.Sequential, siblings: Mapping[str, Sequence[str]]) -> dict[str, bool]:
    """Register hooks that fill the returned dict, :attr:`ProbeResult.uncut`,
    while the layers run.
    """
    outputs: list[Tensor] = []
    uncut = dict.fromkeys(siblings, False)
    run = [name for name in siblings if name.partition(".")[0] in on_meta._modules]
    for column in {column for name in run for column in siblings[name]}:
        on_meta.get_submodule(column).register_forward_hook(
            lambda module, args, output: outputs.append(output)
        )
    for name in run:

        def before(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            uncut[name] = len(args) == 1 and any(args[0] is output for output in outputs)

        on_meta.get_submodule(name).register_forward_pre_hook(before)
    return uncut


class _Forms(NamedTuple):
    """Shapes that modules were seen with."""

    dims: dict[str, int]
    """Module -> number of dims of its first input."""
    mappings: set[str]
    """As :attr:`ProbeResult.mappings`."""


def _record_forms(on_meta: nn.Sequential) -> _Forms:
    """Register hooks that fill the returned value while the layers run."""
    forms = _Forms({}, set())

    def after(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        first, *others = [*args, *kwargs.values()] or [None]
        if not isinstance(first, Tensor):
            return
        forms.dims[name] = first.dim()
        outputs = list(tensors_in(output))
        is_alone = not any(each.shape == first.shape for each in tensors_in(others))
        if (
            first.shape[:-1] == IDS
            and [each.shape for each in outputs] == [first.shape]
            and is_alone
        ):
            forms.mappings.add(name)

    for name, module in on_meta.named_modules():
        if "." in name:
            module.register_forward_hook(partial(after, name), with_kwargs=True)
    return forms


def _check_draws(
    others: DrawRecorder,
    dropouts: DropoutsOfLayers,
    calls: Sequence[tuple[int, float]],
    place: str,
    config: Any,
    attention: str | None,
) -> None:
    """Raise ModelError if the forward draws from the process-wide generator, or if transformers'
    own model drops elements that the layers do not.

    ``calls``: functional dropouts of all layers, as (number of dims, p).
    """
    if others.draws:
        raise ModelError(
            "MW-INTEROP-117",
            f"{place}: its forward draws random numbers in training ({others.draws[0]}) from a"
            " generator of the process, as where it samples experts: no layout could draw the same"
            " numbers again",
        )
    if not calls:
        return
    whole = None if dropouts.without_samples else untouched_dropouts(config, attention)
    if whole is not None and sorted(whole) == sorted(calls):
        return
    if dropouts.without_samples:
        problem = (
            f"a functional dropout of a layer acts on {dropouts.without_samples[0]} for one sample"
            " of 4 tokens, and masks are drawn by sample, along dim 0"
        )
    else:
        problem = (
            f"its layers call {len(calls)} functional dropouts, and transformers' own model"
            f" {'an unknown number' if whole is None else len(whole)}: it also drops elements"
            " between its layers, which a stage would not"
        )
    keys = [
        name
        for name, value in vars(config).items()
        if ("drop" in name) and isinstance(value, float) and value > 0
    ]
    options = ", ".join(f"model.options.{key} = 0.0" for key in keys)
    raise ModelError(
        "MW-INTEROP-081", f"{place}: {problem}. Set {options or 'them to 0 in config.json'}"
    )


def _classify_weights(
    on_meta: nn.Sequential, weight_uses: Mapping[str, Sequence[tuple[int, ...]]]
) -> tuple[list[str], list[str]]:
    """Classify the weights that act on sharded tensors,
    as the modules and problems of :class:`ProbeResult`.

    A vector of length d is shared by all heads if all tensors that it acts on have at least 4 dims,
    the last of size d. Any other weight is a problem.
    """
    per_head_modules: list[str] = []
    problems: list[str] = []
    for name, shapes in weight_uses.items():
        shape = tuple(on_meta.get_parameter(name).shape)
        if len(shape) == 1 and all(len(part) >= 4 and part[-1:] == shape for part in shapes):
            per_head_modules.append(name.rpartition(".")[0])
        else:
            problems.append(
                f"{name} {list(shape)} acts on activations that its plan shards, and has no entry"
                " in the plan"
            )
    return per_head_modules, problems


def _name_in_probed_layer(name: str, probed_layers: Mapping[str, str]) -> str:
    """Return the name of the same module in the equal layer that was run."""
    layer, _, inside = name.partition(".")
    return f"{probed_layers[layer]}.{inside}"
