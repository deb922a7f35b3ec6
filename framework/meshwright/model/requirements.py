"""Requirements on a user's model, checked at build time,
so that stages compute the same as the whole model.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.spectral_norm import SpectralNorm

from meshwright.errors import ModelError
from meshwright.model.cut_recipe import cut_at_lists

PRIVATE_TORCH = {
    "torch.Tensor._backward_hooks": "2.11-2.15",
    "torch.Tensor._post_accumulate_grad_hooks": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

LOSS_OPTIONS = ("label_smoothing", "z_loss")
"""Attributes of a model that are options of the default loss."""


def check_options(path: str, builder: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise :class:`ModelError` for options that the builder does not accept and for missing ones,
    all at once.
    """
    parameters = inspect.signature(builder).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    problems = []
    for name in options:
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; it takes {', '.join(parameters)}"
            problems.append(f"model.options.{name}: {path} does not take it{hint}")
        elif parameters[name].annotation in (bool, "bool") and not isinstance(options[name], bool):
            problems.append(f"model.options.{name} = {options[name]!r}: give true or false")
    for name, parameter in parameters.items():
        if (
            parameter.default is parameter.empty
            and name not in options
            and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            problems.append(f"model.options.{name} is missing: {path} needs it")
    if problems:
        raise ModelError("MW-MODEL-001", "\n".join(problems))


def check_kind(path: str, layers: Any) -> None:
    """Raise :class:`ModelError` unless the builder has returned an nn.Sequential
    with something to train.
    """
    if not isinstance(layers, nn.Sequential):
        raise ModelError(
            "MW-MODEL-004",
            f"{path} returned a {type(layers).__name__}: a pipeline is cut between the elements of"
            " an nn.Sequential. Return nn.Sequential(embedding, block, ...,"
            f" head){cut_at_lists(layers)}",
        )
    if len(layers) == 0:
        raise ModelError(
            "MW-MODEL-005", f"{path} returned an empty nn.Sequential: there is nothing to train"
        )
    if not any(True for _ in layers.parameters()):
        raise ModelError(
            "MW-MODEL-006", f"{path} returned a model without parameters: there is nothing to train"
        )
    if not any(parameter.requires_grad for parameter in layers.parameters()):
        raise ModelError(
            "MW-MODEL-007",
            f"{path} returned a model of which no parameter requires a gradient: there is nothing"
            " to train",
        )


def find_problems(
    path: str, layers: nn.Sequential
) -> tuple[list[tuple[str, ...]], list[ModelError]]:
    """Return the tied sets of parameter names,
    and an error for each requirement that the model breaks.

    Repeated layers are separated, in place.
    """
    problems = [
        *computed_problems(path, layers),
        *parameter_problems(path, layers),
        *sparse_problems(layers),
    ]
    problems += layout_problems(path, layers)
    if any(problem.code in UNFINISHED for problem in problems):
        return [], problems
    separate_repeated_layers(layers)
    problems += attribute_problems(path, layers)
    tied, broken = tied_sets(path, layers)
    return tied, [*problems, *broken, *undeclared_ties(path, layers, tied)]


UNFINISHED = {"MW-MODEL-012", "MW-MODEL-017", "MW-MODEL-057"}
"""Codes of problems with which no module can be copied and reset:
first values are looked at when these are mended.
"""
DESCRIBABLE = {
    *("MW-MODEL-010", "MW-MODEL-048", "MW-MODEL-049"),  # first values
    # sparse gradients, hooks, ties
    *("MW-MODEL-011", "MW-MODEL-016", "MW-MODEL-025", "MW-MODEL-047"),
}
"""Codes of problems in spite of which a forward of the model on meta finds the problems
of its layers.
"""
ALIKE = 10
"""Errors with one code that are shown; more are counted."""


def joined(problems: Sequence[ModelError]) -> ModelError:
    """Return one error for all problems, of each code the first ones."""
    by_code: dict[str, list[ModelError]] = {}
    for problem in problems:
        by_code.setdefault(problem.code, []).append(problem)
    shown: list[ModelError] = []
    for alike in by_code.values():
        rest = len(alike) - ALIKE
        shown += alike[:ALIKE]
        if rest > 0:
            shown[-1] = shown[-1].extended(f". And {rest} more of this kind")
    return shown[0] if len(shown) == 1 else ModelError.join(shown)


def separate_repeated_layers(layers: nn.Sequential) -> None:
    """Give each position of the Sequential its own module, in place,
    because stages store layers by name.

    A layer that occurs twice keeps its parameters in both positions, which is then a tie like any
    other.
    """
    seen: set[int] = set()
    for name, layer in list(layers._modules.items()):
        assert layer is not None
        if id(layer) in seen:
            layers._modules[name] = copied = copy.deepcopy(
                layer, {id(p): p for p in layer.parameters()}
            )
            for each in (*layer.modules(), *copied.modules()):
                setattr(each, REPEATED, True)
        seen.add(id(layer))


def sparse_problems(layers: nn.Sequential) -> Iterator[ModelError]:
    """Yield an error for each module with sparse gradients: the flat gradient buckets are dense."""
    for name, module in layers.named_modules():
        if getattr(module, "sparse", False) is True:
            yield ModelError(
                "MW-MODEL-011",
                f"{name} is a {type(module).__name__} with sparse=True: gradients are summed over"
                " replicas in dense buckets. Leave sparse out",
            )


REPEATED = "_is_repeated"
"""Attribute of the modules of a layer that occurs twice in the Sequential."""
HAS_HOOKS = "_had_hooks"
"""Attribute of a meta parameter whose original had hooks."""
CLASS = "_was_class"
"""Attribute of a meta parameter whose original was of a subclass: the subclass's name."""


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return True when a hook is registered on the parameter's gradient."""
    hooks = getattr(parameter, "_backward_hooks", None) or getattr(
        parameter, "_post_accumulate_grad_hooks", None
    )
    return bool(hooks) or hasattr(parameter, HAS_HOOKS)


def parameter_problems(path: str, layers: nn.Sequential) -> Iterator[ModelError]:
    """Yield an error for each parameter that is not plain, floating-point, of one dtype and a known
    shape, or that has a gradient hook.
    """
    first: tuple[str, nn.Parameter] | None = None
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            owner = layers.get_submodule(name.rpartition(".")[0])
            yield ModelError(
                "MW-MODEL-012",
                f"{path}: parameter {name} of {type(owner).__name__} has no shape until its first"
                " forward, and the model is cut into stages before that: use the module that is"
                " not lazy, with its sizes (nn.Linear(in_features, out_features) for"
                " nn.LazyLinear)",
            )
            continue
        if not parameter.is_floating_point():
            instead = "register it as a buffer (register_buffer)"
            if parameter.is_complex():
                instead = (
                    "keep a real parameter with a last dim of 2, and use"
                    " torch.view_as_complex(parameter) in forward"
                )
            yield ModelError(
                "MW-MODEL-013",
                f"{path}: parameter {name} is {str(parameter.dtype).removeprefix('torch.')}:"
                " parameters are kept in flat buckets of train.dtype, a floating-point one."
                f" Instead, {instead}",
            )
        if hasattr(parameter, CLASS):
            yield ModelError(
                "MW-MODEL-014",
                f"{path}: parameter {name} is a {getattr(parameter, CLASS)}, a class of its own:"
                " parameters are views of flat buckets, which are plain tensors. Use nn.Parameter"
                " of a plain tensor, and do in forward what the class does",
            )
        first = first or (name, parameter)
        if parameter.dtype != first[1].dtype:
            yield ModelError(
                "MW-MODEL-015",
                f"{path}: parameter {name} is {_dtype(parameter)}, and {first[0]} is"
                f" {_dtype(first[1])}: all are kept in train.dtype. Build all of them in one dtype,"
                " and cast in forward where another is needed",
            )
        if has_hooks(parameter):
            yield ModelError(
                "MW-MODEL-016",
                f"{path}: parameter {name} has a hook on its gradient (register_hook or"
                " register_post_accumulate_grad_hook): it would run once for each micro-batch, on"
                " sums that depend on the layout. Do in forward what it does (a hook on an"
                " activation, or a torch.autograd.Function around the weight), or freeze the"
                " parameter with requires_grad_(False)",
            )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def computed_problems(path: str, layers: nn.Sequential) -> Iterator[ModelError]:
    """Yield an error for each weight that torch.nn.utils computes once from other parameters."""
    for name, module in layers.named_modules():
        computed = next(
            (
                key
                for key, value in vars(module).items()
                if isinstance(value, Tensor) and value.grad_fn is not None
            ),
            next(
                (
                    hook.name
                    for hook in module._forward_pre_hooks.values()
                    if isinstance(hook, SpectralNorm)
                ),
                None,
            ),
        )
        if computed is not None:
            yield ModelError(
                "MW-MODEL-017",
                f"{path}: {name}.{computed} is computed from parameters while the model is built"
                " (torch.nn.utils' weight_norm, spectral_norm or prune): it would not follow them."
                " Compute it in forward from the parameters, as F.linear(x, g * v / v.norm(dim=1,"
                " keepdim=True))",
            )


def attribute_problems(path: str, layers: nn.Sequential) -> Iterator[ModelError]:
    """Yield an error for each attribute of the model that has a wrong type or value."""
    for attribute, wanted, example in (
        ("sharding_plan", dict, '{"block*.up": "column", "block*.down": "row"}'),
        ("divisible", dict, '{"block*.qkv": 8}'),
        ("shared_units", dict, '{"block*.qkv": ((128, 64, 64), 2)}'),
        ("tied_weights", (list, tuple), '[("embedding.weight", "head.weight")]'),
        ("selective_recompute", (list, tuple), '["block*.attention.core"]'),
        ("loss_heads", (list, tuple), "[(0, 1.0), (1, 0.1)]"),
        ("matrices", dict, '{"block*.attention.qkv": (128, 64, 64)}'),
        ("impossible", dict, '{"tp": "the heads share a weight"}'),
    ):
        found = getattr(layers, attribute, None)
        if found is not None and not isinstance(found, wanted):
            yield ModelError(
                "MW-MODEL-019",
                f"{path}: model.{attribute} is a {type(found).__name__}; write it as {example}",
            )
    if not callable(getattr(layers, "initialise", len)):
        yield ModelError(
            "MW-MODEL-020", f"{path}: model.initialise is no function of (parameter name, tensor)"
        )
    if getattr(layers, "loss", None) is not None and not callable(getattr(layers, "loss", None)):
        yield ModelError(
            "MW-MODEL-021",
            f"{path}: model.loss is no function of (output of the last layer, labels)",
        )
    heads = getattr(layers, "loss_heads", None) or ()
    heads = heads if isinstance(heads, list | tuple) else ()
    pairs = [
        tuple(head) if isinstance(head, list | tuple) and len(head) == 2 else (-1, 0)
        for head in heads
    ]
    fits = all(
        type(i) is int and i >= 0 and isinstance(w, int | float) and 0 <= w < math.inf
        for i, w in pairs
    )
    if pairs and not (
        fits and pairs[0][0] == 0 < pairs[0][1] and getattr(layers, "loss", None) is None
    ):
        yield ModelError(
            "MW-MODEL-034",
            f"{path}: model.loss_heads = {heads!r}: it holds (shift of the labels, weight of the"
            " loss) of each logits that the last layer returns, such as [(0, 1.0), (1, 0.1)], the"
            " first with shift 0 and a weight above 0; a model with its own model.loss adds up its"
            " heads there",
        )
    for option in LOSS_OPTIONS:
        given = getattr(layers, option, 0)
        fits = isinstance(given, int | float) and 0 <= given < (
            1 if option == "label_smoothing" else math.inf
        )
        if not fits or (given and getattr(layers, "loss", None) is not None):
            yield ModelError(
                "MW-MODEL-027",
                f"{path}: model.{option} = {given!r}: it is a number, at least 0 (label_smoothing"
                " also below 1), and an option of the default cross-entropy: a model with its own"
                " model.loss adds it there",
            )


def tied_sets(path: str, layers: nn.Sequential) -> tuple[list[tuple[str, ...]], list[ModelError]]:
    """Return the declared tied sets, merged if they share a name,
    each with its canonical name first; and the errors.

    A set as declared keeps its order. Merged sets follow the model's order.
    """
    shapes = {
        name: tuple(each.shape) for name, each in layers.named_parameters(remove_duplicate=False)
    }
    sets: list[tuple[str, ...]] = []
    problems: list[ModelError] = []
    declared_ties = getattr(layers, "tied_weights", [])
    # or attribute_problems has it
    for declared in declared_ties if isinstance(declared_ties, list | tuple) else []:
        broken = list(_unknown_ties(path, declared, shapes))
        problems += broken
        if broken:
            continue
        names = tuple(declared)
        sharing = [other for other in sets if set(other) & set(names)]
        if sharing:
            sets = [other for other in sets if other not in sharing]
            members = set(names).union(*sharing)
            names = tuple(name for name in shapes if name in members)
        sets.append(names)
    return sets, [
        *problems,
        *(problem for names in sets for problem in _unequal_ties(path, names, layers)),
    ]


def _unknown_ties(
    path: str, declared: Any, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[ModelError]:
    """Yield an error for a tie that is no tuple of names,
    or for each name that is no parameter's.
    """
    if isinstance(declared, str):
        yield ModelError(
            "MW-MODEL-022",
            f"{path}: tied_weights holds {declared!r}; each tie is a tuple of parameter names",
        )
        return
    for name in declared:
        if name not in shapes:
            close = difflib.get_close_matches(str(name), shapes, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield ModelError(
                "MW-MODEL-023",
                f"{path}: tied_weights names {name!r}, which is no parameter of the model{hint}",
            )


def _unequal_ties(path: str, names: tuple[str, ...], layers: nn.Sequential) -> Iterator[ModelError]:
    """Yield errors for tied weights of which the shapes differ, or only some are frozen."""
    parameters = {name: layers.get_parameter(name) for name in names}
    if len({parameter.shape for parameter in parameters.values()}) > 1:
        found = ", ".join(
            f"{name} is {tuple(parameter.shape)}" for name, parameter in parameters.items()
        )
        yield ModelError(
            "MW-MODEL-024", f"{path}: tied weights are one weight and have one shape, but {found}"
        )
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen and len(frozen) < len(names):
        yield ModelError(
            "MW-MODEL-047",
            f"{path}: tied weights are one weight, but of {', '.join(names)} only"
            f" {', '.join(frozen)} has requires_grad = False: freeze all of them, or none",
        )


def undeclared_ties(
    path: str, layers: nn.Sequential, tied: list[tuple[str, ...]]
) -> Iterator[ModelError]:
    """Yield an error for each shared weight without a declaration:
    each pipeline stage holds its own copy.
    """
    seen: dict[int, str] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name and not any(first in group and name in group for group in tied):
            yield ModelError(
                "MW-MODEL-025",
                f"{path}: {first} and {name} are one parameter, but tied_weights does not say so: a"
                " stage that holds only one of them would train it alone. Set model.tied_weights ="
                f" [({first!r}, {name!r})]",
            )


def layout_problems(path: str, layers: nn.Sequential) -> Iterator[ModelError]:
    """Yield an error for each buffer that is sparse, or has another layout without strides."""
    for name, buffer in layers.named_buffers():
        if not isinstance(buffer, UninitializedBuffer) and buffer.layout is not torch.strided:
            layout = str(buffer.layout).removeprefix("torch.")
            yield ModelError(
                "MW-MODEL-057",
                f"{path}: buffer {name} has the layout {layout}: only dense tensors are compared"
                " between processes, sent and saved. Keep it dense (tensor.to_dense()), or keep"
                " its indices and values as two buffers and make the sparse tensor in forward",
            )


def buffer_problems(path: str, layers: nn.Sequential) -> Iterator[ModelError]:
    """Yield an error for each buffer that the builder leaves on the meta device."""
    for name, buffer in layers.named_buffers():
        if buffer.is_meta:
            yield ModelError(
                "MW-MODEL-026",
                f"{path}: buffer {name} is on the meta device and has no value: make it on the CPU "
                f'(device="cpu"), also where the parameters are on meta',
            )
