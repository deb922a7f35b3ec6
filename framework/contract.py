"""What a user's model must keep to so that it can be cut into stages and mean the same: checked as it is built."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from framework.errors import ModelError


def separate_repeated_layers(layers: nn.Sequential) -> None:
    """Give each place of the Sequential a module of its own, in place: stages hold layers by their names.

    A layer that stands there twice keeps its parameters in both places, which is then a tie like any other.
    """
    seen: set[int] = set()
    for name, layer in list(layers._modules.items()):
        assert layer is not None
        if id(layer) in seen:
            layers._modules[name] = copy.deepcopy(layer, {id(p): p for p in layer.parameters()})
        seen.add(id(layer))


def check_sparse(layers: nn.Sequential) -> None:
    """Gradients are summed in flat buckets: those of all elements."""
    for name, module in layers.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ModelError(
                f"{name} is a {type(module).__name__} with sparse=True: gradients are summed over replicas in dense "
                f"buckets. Leave sparse out"
            )


class WriteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the writes to storages on the meta device, by whatever alias: a tensor's ``.data``, a view, itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: dict[int, int] = {}
        self._alive: list[Any] = []  # a storage that is gone could leave its address to another

    def count_of(self, tensor: Tensor) -> int:
        """Return how often the tensor's storage was written."""
        return self._counts.get(tensor.untyped_storage()._cdata, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
            storage = args[0].untyped_storage()
            self._alive.append(storage)
            self._counts[storage._cdata] = self._counts.get(storage._cdata, 0) + 1
        return func(*args, **(kwargs or {}))


HAS_HOOKS = "_had_hooks"
"""Set on a parameter whose predecessor had hooks when it went to the meta device."""


def has_hooks(parameter: nn.Parameter) -> bool:
    """True when a function is registered on the parameter's gradient."""
    hooks = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks) or hasattr(parameter, HAS_HOOKS)


def check_parameters(path: str, layers: nn.Sequential) -> None:
    """Parameters are floating-point, of a known shape, and nothing is registered on their gradients."""
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            owner = layers.get_submodule(name.rpartition(".")[0])
            raise ModelError(
                f"{path}: parameter {name} of {type(owner).__name__} has no shape until its first forward, and the "
                f"model is cut into stages before that: use the module that is not lazy, with its sizes "
                f"(nn.Linear(in_features, out_features) for nn.LazyLinear)"
            )
        if not parameter.is_floating_point():
            instead = (
                "keep a real parameter with a last dim of 2, and use torch.view_as_complex(parameter) in forward"
                if parameter.is_complex()
                else "register it as a buffer (register_buffer)"
            )
            raise ModelError(
                f"{path}: parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: parameters are kept in "
                f"flat buckets of train.dtype, a floating-point one. Instead, {instead}"
            )
        if has_hooks(parameter):
            raise ModelError(
                f"{path}: parameter {name} has a hook on its gradient (register_hook or "
                f"register_post_accumulate_grad_hook): it would run once for each micro-batch, on sums that depend on "
                f"the layout. Do in forward what it does (a hook on an activation, or a torch.autograd.Function "
                f"around the weight), or freeze the parameter with requires_grad_(False)"
            )


def check_attributes(path: str, layers: nn.Sequential) -> None:
    """The types of what a model may carry."""
    for attribute, wanted, example in (
        ("sharding_plan", dict, '{"block*.up": "column", "block*.down": "row"}'),
        ("divisible", dict, '{"block*.qkv": 8}'),
        ("tied_weights", (list, tuple), '[("embedding.weight", "head.weight")]'),
        ("selective_recompute", (list, tuple), '["block*.attention.core"]'),
        ("impossible", dict, '{"tp": "the heads share a weight"}'),
    ):
        found = getattr(layers, attribute, None)
        if found is not None and not isinstance(found, wanted):
            raise ModelError(f"{path}: model.{attribute} is a {type(found).__name__}; write it as {example}")
    if not callable(getattr(layers, "initialise", len)):
        raise ModelError(f"{path}: model.initialise is no function of (parameter name, tensor)")
    if getattr(layers, "loss", None) is not None and not callable(getattr(layers, "loss", None)):
        raise ModelError(f"{path}: model.loss is no function of (output of the last layer, labels)")


def tied_sets(path: str, layers: nn.Sequential) -> list[tuple[str, ...]]:
    """The declared ties, those that share a name joined, each with its canonical name first.

    A tie as declared keeps its order; joined ones have the model's.
    """
    shapes = {name: tuple(p.shape) for name, p in layers.named_parameters(remove_duplicate=False)}
    sets: list[tuple[str, ...]] = []
    for declared in getattr(layers, "tied_weights", []):
        if isinstance(declared, str):
            raise ModelError(f"{path}: tied_weights holds {declared!r}; each tie is a tuple of parameter names")
        names = tuple(declared)
        for name in names:
            if name not in shapes:
                close = difflib.get_close_matches(str(name), shapes, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ModelError(f"{path}: tied_weights names {name!r}, which is no parameter of the model{hint}")
        sharing = [other for other in sets if set(other) & set(names)]
        if sharing:
            sets = [other for other in sets if other not in sharing]
            members = set(names).union(*sharing)
            names = tuple(name for name in shapes if name in members)
        sets.append(names)
    for names in sets:
        if len({shapes[name] for name in names}) > 1:
            found = ", ".join(f"{name} is {shapes[name]}" for name in names)
            raise ModelError(f"{path}: tied weights are one weight and have one shape, but {found}")
    return sets


def check_ties_declared(path: str, layers: nn.Sequential, tied: list[tuple[str, ...]]) -> None:
    """A weight shared between layers must be declared: in a pipeline each stage holds a copy, and must know of it."""
    seen: dict[int, str] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name and not any(first in group and name in group for group in tied):
            raise ModelError(
                f"{path}: {first} and {name} are one parameter, but tied_weights does not say so: a stage that holds "
                f"only one of them would train it alone. Set model.tied_weights = [({first!r}, {name!r})]"
            )


def check_buffers(path: str, layers: nn.Sequential) -> None:
    """Buffers are real; one that was made out of a parameter is not, since parameters have no values yet."""
    for name, buffer in layers.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"{path}: buffer {name} is made out of a parameter, which has no value while the model is built: "
                f"compute it from constants in __init__, or from the parameter in forward"
            )


def check_initial_values(path: str, layers: nn.Sequential, writes: WriteCounter) -> None:
    """Without ``initialise``, first values come from each module's ``reset_parameters()`` and from nowhere else.

    A module without it, or a builder that has set a value otherwise, is refused: the value would be lost, as each
    process draws its parameters anew by name. ``writes``: those of the builder.
    """
    checked: set[int] = set()
    for module_name, module in layers.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        name = f"{module_name}.{next(iter(own))}".lstrip(".")
        if not callable(getattr(module, "reset_parameters", None)):
            raise ModelError(
                f"{path}: parameter {name}: {type(module).__name__} has no reset_parameters(), so its "
                f"first value is unknown in a process that holds another part of the model. Give the module a "
                f"reset_parameters(), or the model an attribute initialise(name, tensor)"
            )
        again = copy.deepcopy(module)
        with WriteCounter() as resets:
            again.reset_parameters()
        for attribute, parameter in own.items():
            if (
                writes.count_of(parameter) > resets.count_of(again.get_parameter(attribute))
                and id(parameter) not in checked
            ):
                raise ModelError(
                    f"{path}: the value of parameter {module_name}.{attribute} is set outside of "
                    f"{type(module).__name__}.reset_parameters(), and would be lost: each process draws its parameters "
                    f"anew. Set it in reset_parameters(), or give the model an attribute initialise(name, tensor)"
                )
            checked.add(id(parameter))
