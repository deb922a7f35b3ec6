"""Detection of layers that are not self-contained.

A pipeline may put any two layers on different ranks, and call each any number of times. A layer
must therefore compute from its input, its own parameters and buffers, and nothing else. One forward
on the meta device finds layers that

    use a parameter that only another layer holds     a head tied by a closure
    use a tensor that was not passed to them          a module-level dict, a list, left over from an earlier forward
    write to a parameter                              clamp_, EMA, nn.Embedding(max_norm=...), spectral_norm
    hook a parameter's gradient                       weight.register_hook(...) in forward
    draw random numbers                               torch.rand, numpy, random, generators of their own
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.errors import ModelError
from meshwright.model.calls import ModuleCalls
from meshwright.model.first_values import listed
from meshwright.model.requirements import has_hooks, joined
from meshwright.pipeline.plan.generators import generator_states
from meshwright.pipeline.plan.outline import Outline, outline_of
from meshwright.system.packages import OWN_PACKAGES
from meshwright.system.user_line import is_own_code, user_line

CALLS_BEFORE = 2
PLAIN = (bool, int, float, str)
OF_SHAPE = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}
"""Operations that use only shape, dtype and device of their argument."""
OWN = {"torch", *OWN_PACKAGES}
COMPARED = 4096
"""Elements of a tensor off the meta device that are compared between two calls."""
BY_NAME = (
    "Use nn.Dropout, or torch's functions of dropout in the layer's forward, whose masks are drawn"
    " by name and sample; other noise belongs into the samples"
)


class LayerWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that finds where layers are not self-contained.

    An error names the layer, the tensor and the operation, and where it can the line of code.
    :meth:`problems` returns all of them: an operation is noted, and the forward goes on.

    Args:
        layers: a copy of the model on meta, whose layers are run one by one, each by :meth:`run`.
        original: the model that was copied. References that copying missed, as in a closure, lead
            to its parameters.
        calls: uses of modules, counted in each layer that is watched.
    """

    def __init__(
        self, layers: nn.Sequential, original: nn.Sequential, calls: ModuleCalls | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls or ModuleCalls(layers, {})
        self._held: dict[int, list[str]] = {}
        """Names of the copy's parameters and buffers, by storage."""
        self._left_behind: dict[int, str] = {}
        """Name of the original model's parameter, by storage."""
        self._made: dict[int, str] = {}
        """Layer that computed a tensor from the samples or a weight, by storage. Constants are
        absent: any layer may keep them.
        """
        self._trace: list[tuple[Any, ...]] = []
        """Operations of one forward, with their plain arguments and the numbers of tensors
        that are not on meta.
        """
        self._faults: dict[str, tuple[ModelError, list[str]]] = {}
        """Errors, and the layers of each, by their message without the layer's name."""
        self._alive: dict[int, Any] = {}  # keeps storages alive, as a freed address could be reused
        self._layer, self._where, self._is_ours = "", "", False
        self._seen: list[tuple[Outline, object]] = []
        self._inputs: set[int] = set()
        self._own: dict[int, str] = {}
        """Name within the running layer of each of its parameters, by id."""
        self._parameters = {name for name, _ in layers.named_parameters(remove_duplicate=False)}
        for name, tensor in (
            *layers.named_parameters(remove_duplicate=False),
            *layers.named_buffers(remove_duplicate=False),
        ):
            self._held.setdefault(self._key(tensor), []).append(name)
        for name, parameter in original.named_parameters():
            self._left_behind[self._key(parameter)] = name

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._alive:
            self._alive[key] = storage
        return key

    def run(self, name: str, layer: nn.Module, value: Any, received: Sequence[Tensor]) -> Any:
        """Return ``layer(value)`` and watch its operations.

        A layer with classes from outside torch and meshwright may keep state, so it is first called
        twice, with empty copies of ``value``. A layer that runs only without a dispatch mode
        (flex_attention) is not watched.

        ``received``: tensors of the stage that the layer gets as they are; other tensors are
            copied.
        """
        self._layer, self._where = name, f"layer {name} ({type(layer).__name__})"
        # it may keep values derived from its input alone
        self._is_ours = is_own_code(type(layer).__module__)
        self._own = {id(parameter): key for key, parameter in layer.named_parameters()}
        with self._calls.watching(name, layer):
            try:
                output = self._watched(name, layer, value, {id(leaf) for leaf in received})
            except Exception:  # the layer's own error is raised again, and the caller reports it
                if self._is_at_fault():
                    raise joined(self.problems()) from None
                output = layer(value)
            self._calls.in_eval(layer, lambda: layer(tree_map(_like, value)))
            return output

    def problems(self) -> list[ModelError]:
        """Return all errors; one that several layers share names the first,
        and lists the others.
        """
        problems = []
        for error, (_, *others) in self._faults.values():
            problems.append(
                error.extended(f". The same in {listed('layer', others)}") if others else error
            )
        return problems

    def _note(self, error: ModelError) -> None:
        """Add an error of the running layer."""
        key = error.message.replace(self._where, "").replace(f"{self._layer}.", "")
        layers = self._faults.setdefault(key, (error, []))[1]
        if self._layer not in layers:
            layers.append(self._layer)

    def _is_at_fault(self) -> bool:
        return any(self._layer in layers for _, layers in self._faults.values())

    def _watched(self, name: str, layer: nn.Module, value: Any, kept: Collection[int]) -> Any:
        traces = []
        for _ in range(0 if _is_known(layer) else CALLS_BEFORE):
            with self._calling(layer, tree_map(_like, value)) as before:
                layer(before)
            traces.append(self._trace)
            mine = f"{name} in an earlier forward"
            self._made = {
                key: mine if maker == name else maker for key, maker in self._made.items()
            }
        with self._calling(
            layer, tree_map(lambda leaf: leaf if id(leaf) in kept else _like(leaf), value)
        ) as value:
            output = layer(value)
        # the first call may create what later calls keep
        if traces and traces[-1] != self._trace and not self._is_at_fault():
            self._note(
                ModelError(
                    "MW-PIPELINE-021",
                    f"{self._where} does something else in each call for the same input: it counts"
                    " its calls, or draws random numbers by a generator that is no attribute of"
                    " it. Keep what changes in a buffer; use nn.Dropout for noise",
                )
            )
        return output

    @contextmanager
    def _calling(self, layer: nn.Module, value: Any) -> Iterator[Any]:
        self._inputs = {self._key(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
        self._made |= dict.fromkeys(self._inputs, self._layer)
        self._trace = []
        places = {key: self._key(parameter) for key, parameter in layer.named_parameters()}
        drawn = generator_states(layer)
        with self:
            yield value
        for key, parameter in layer.named_parameters():
            if places.get(key) != self._key(parameter):
                self._note(
                    ModelError(
                        "MW-PIPELINE-022", self._writes(f"{self._layer}.{key}", ".data = ...")
                    )
                )
            if has_hooks(parameter):
                self._note(
                    ModelError(
                        "MW-PIPELINE-045",
                        f"{self._where} registers a hook on its parameter {self._layer}.{key} in"
                        " forward: each call adds one more, and how many calls a step has depends"
                        " on the layout. Do what it does to the gradient in forward, by a hook on"
                        " an activation or a torch.autograd.Function around the weight",
                    )
                )
        for source, state in generator_states(layer).items():
            if drawn.get(source) != state:
                self._note(ModelError("MW-PIPELINE-023", self._draws(source)))

    def has_seen(self, name: str, layer: nn.Module) -> bool:
        """Return whether a layer with an equal outline, and with the same placed on it,
        was watched before.

        It is always False for layers with classes from outside torch and meshwright. Other classes
        keep no functions or references that a comparison of their attributes would miss.
        """
        if not _is_known(layer):
            return False
        outline = outline_of(layer), self._calls.marks_in(name)
        if outline in self._seen:
            return True
        self._seen.append(outline)
        return False

    def note(self, name: str, value: Any) -> None:
        """Record the tensors of a layer's output as made by it,
        for a layer that :meth:`run` did not run.
        """
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._made.setdefault(self._key(leaf), name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            for error in self._misused(tensor):
                self._note(error)
            if name not in OF_SHAPE:
                self._calls.use(self._names(tensor))
        for error in self._written(func, args, kwargs):
            self._note(error)
        if torch.Tag.nondeterministic_seeded in func.tags and is_drawing(func, args, kwargs):
            source = f"torch's random generator ({name})"
            self._note(ModelError("MW-PIPELINE-024", self._draws(source, user_line())))
        plain = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PLAIN))
        self._trace.append((name, *plain, *map(_numbers, inputs)))
        result = func(*args, **kwargs)
        if name not in OF_SHAPE and any(
            self._key(tensor) in self._made or self._names(tensor) for tensor in inputs
        ):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._made.setdefault(self._key(leaf), self._layer)
        return result

    def _names(self, tensor: Tensor) -> list[str]:
        return self._held.get(self._key(tensor), [])

    def _misused(self, tensor: Tensor) -> Iterator[ModelError]:
        """Yield an error for a tensor that an operation reads and
        that is not the running layer's to read.
        """
        key, names = self._key(tensor), self._names(tensor)
        foreign = self._left_behind.get(key) if not names else names[0]
        if foreign is not None and not any(name.partition(".")[0] == self._layer for name in names):
            other = foreign.partition(".")[0]
            where = "but not as its attribute"
            if other != self._layer:
                where = f"which layer {other} holds and it does not"
            yield ModelError(
                "MW-PIPELINE-025",
                f"{self._where} uses {foreign}, {where} (a closure, a list, a global variable): a"
                " stage holds its own layers' parameters and no others. Make the parameter or its"
                " module an attribute of the layer"
                + (
                    f", and declare the tie: model.tied_weights = [({foreign!r}, ...)]"
                    if other != self._layer
                    else ""
                ),
            )
        if isinstance(tensor, nn.Parameter) and not names:
            if id(tensor) in self._own:
                yield ModelError(
                    "MW-PIPELINE-026",
                    self._writes(f"{self._layer}.{self._own[id(tensor)]}", ".data = ..."),
                )
                return
            yield ModelError(
                "MW-PIPELINE-027",
                f"{self._where} uses a parameter of shape {tuple(tensor.shape)} that belongs to no"
                " layer (it lies in a list, a dict or a closure): no optimizer would have it. Make"
                " it or its module an attribute of the layer; modules in a list belong into an"
                " nn.ModuleList",
            )
        maker = self._made.get(key)
        is_foreign = maker not in (None, self._layer) and key not in self._inputs
        if is_foreign and not names and not self._is_ours:
            yield ModelError(
                "MW-PIPELINE-028",
                f"{self._where} uses a tensor of shape {tuple(tensor.shape)} of layer {maker} that"
                " is not in its input (it lies in a global variable, a list, an attribute): on"
                " another stage it would be missing, and with several micro-batches in flight"
                " another one's. Let the layers between hand it on, as a tuple or dict of tensors",
            )

    def _written(self, func: Any, args: Any, kwargs: Any) -> Iterator[ModelError]:
        """Yield an error for each parameter that an operation writes to."""
        if not func._schema.is_mutable:
            return
        for at, argument in enumerate(func._schema.arguments):
            argument_value = args[at] if at < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(argument_value):
                names = self._names(tensor) if isinstance(tensor, Tensor) else []
                written = next((name for name in names if name in self._parameters), None)
                if written is not None:
                    how = func._schema.name.removeprefix("aten::")
                    yield ModelError("MW-PIPELINE-029", self._writes(written, how))

    def _writes(self, parameter: str, how: str) -> str:
        return (
            f"{self._where} writes to its parameter {parameter} in forward ({how}): how often it"
            " does so within a step depends on the layout. Compute with a changed copy instead"
            " (F.linear(x, weight.clamp(-1, 1))), or keep what changes in a buffer"
        )

    def _draws(self, source: str, place: str = "") -> str:
        at = f" at {place}" if place else ""
        return (
            f"{self._where} draws from {source} in forward{at}: the draw would differ between"
            f" layouts and after a resume. {BY_NAME}"
        )


def _numbers(tensor: Tensor) -> str:
    """Return the first numbers of a tensor that a layer made or keeps off the meta device;
    "" for one on meta.
    """
    if (
        tensor.device.type != "cpu"
        or type(tensor) is not Tensor
        or tensor.layout is not torch.strided
    ):
        return ""
    return repr(tensor.detach().reshape(-1)[:COMPARED].tolist())


def _is_known(layer: nn.Module) -> bool:
    return all(type(module).__module__.partition(".")[0] in OWN for module in layer.modules())


def _like(leaf: Any) -> Any:
    """Return an empty copy of a meta tensor with the same strides; anything else unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    copy = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return copy.requires_grad_().clone() if leaf.requires_grad else copy


def is_drawing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation draws random numbers:
    torch also tags attention and dropout that drop nothing.
    """
    given = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    } | kwargs
    probability = given.get("dropout_p", given.get("p") if "dropout" in func._schema.name else None)
    return probability != 0.0 and given.get("train", True) is not False
