"""Requirements on a user's model, checked at build time, so that stages compute the same as the whole model."""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from meshwright.errors import ModelError

LOSS_OPTIONS = ("label_smoothing", "z_loss")
"""Attributes of a model that are options of the default loss."""


def check_options(path: str, builder: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise :class:`ModelError` for options that the builder does not accept and for missing ones, all at once."""
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


def check_model(path: str, layers: nn.Sequential) -> list[tuple[str, ...]]:
    """Check all requirements, separate repeated layers, and return the tied sets of parameter names."""
    check_computed(path, layers)
    check_parameters(path, layers)
    check_sparse(layers)
    separate_repeated_layers(layers)
    check_attributes(path, layers)
    tied = tied_sets(path, layers)
    check_ties_declared(path, layers, tied)
    check_buffers(path, layers)
    return tied


def separate_repeated_layers(layers: nn.Sequential) -> None:
    """Give each position of the Sequential its own module, in place, because stages store layers by name.

    A layer that occurs twice keeps its parameters in both positions, which is then a tie like any other.
    """
    seen: set[int] = set()
    for name, layer in list(layers._modules.items()):
        assert layer is not None
        if id(layer) in seen:
            layers._modules[name] = copied = copy.deepcopy(layer, {id(p): p for p in layer.parameters()})
            for each in (*layer.modules(), *copied.modules()):
                setattr(each, REPEATED, True)
        seen.add(id(layer))


def check_sparse(layers: nn.Sequential) -> None:
    """Refuse sparse gradients: the flat gradient buckets are dense."""
    for name, module in layers.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ModelError(
                "MW-MODEL-011",
                f"{name} is a {type(module).__name__} with sparse=True: gradients are summed over replicas in dense "
                f"buckets. Leave sparse out",
            )


REPEATED = "_is_repeated"
"""Attribute of the modules of a layer that occurs twice in the Sequential."""
HAS_HOOKS = "_had_hooks"
"""Attribute of a meta parameter whose original had hooks."""
CLASS = "_was_class"
"""Attribute of a meta parameter whose original was of a subclass: the subclass's name."""


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return True when a hook is registered on the parameter's gradient."""
    hooks = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks) or hasattr(parameter, HAS_HOOKS)


def check_parameters(path: str, layers: nn.Sequential) -> None:
    """Require parameters that are plain, floating-point, of one dtype and a known shape, without gradient hooks."""
    first: tuple[str, nn.Parameter] | None = None
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            owner = layers.get_submodule(name.rpartition(".")[0])
            raise ModelError(
                "MW-MODEL-012",
                f"{path}: parameter {name} of {type(owner).__name__} has no shape until its first forward, and the "
                f"model is cut into stages before that: use the module that is not lazy, with its sizes "
                f"(nn.Linear(in_features, out_features) for nn.LazyLinear)",
            )
        if not parameter.is_floating_point():
            instead = (
                "keep a real parameter with a last dim of 2, and use torch.view_as_complex(parameter) in forward"
                if parameter.is_complex()
                else "register it as a buffer (register_buffer)"
            )
            raise ModelError(
                "MW-MODEL-013",
                f"{path}: parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: parameters are kept in "
                f"flat buckets of train.dtype, a floating-point one. Instead, {instead}",
            )
        if hasattr(parameter, CLASS):
            raise ModelError(
                "MW-MODEL-014",
                f"{path}: parameter {name} is a {getattr(parameter, CLASS)}, a class of its own: parameters are views "
                f"of flat buckets, which are plain tensors. Use nn.Parameter of a plain tensor, and do in forward what "
                f"the class does",
            )
        first = first or (name, parameter)
        if parameter.dtype != first[1].dtype:
            raise ModelError(
                "MW-MODEL-015",
                f"{path}: parameter {name} is {_dtype(parameter)}, and {first[0]} is {_dtype(first[1])}: all are kept "
                f"in train.dtype. Build all of them in one dtype, and cast in forward where another is needed",
            )
        if has_hooks(parameter):
            raise ModelError(
                "MW-MODEL-016",
                f"{path}: parameter {name} has a hook on its gradient (register_hook or "
                f"register_post_accumulate_grad_hook): it would run once for each micro-batch, on sums that depend on "
                f"the layout. Do in forward what it does (a hook on an activation, or a torch.autograd.Function "
                f"around the weight), or freeze the parameter with requires_grad_(False)",
            )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_computed(path: str, layers: nn.Sequential) -> None:
    """Refuse weights that torch.nn.utils computes from other parameters, whose first values would be unknown."""
    declared = getattr(layers, "initialise", None) is not None
    for name, module in layers.named_modules():
        computed = next(
            (key for key, value in vars(module).items() if isinstance(value, Tensor) and value.grad_fn is not None),
            None,
        )
        if computed is not None:
            raise ModelError(
                "MW-MODEL-017",
                f"{path}: {name}.{computed} is computed from parameters while the model is built (torch.nn.utils' "
                f"weight_norm, spectral_norm or prune): it would not follow them. Compute it in forward from the "
                f"parameters, as F.linear(x, g * v / v.norm(dim=1, keepdim=True))",
            )
        if is_parametrized(module) and not declared:
            raise ModelError(
                "MW-MODEL-018",
                f"{path}: {name}.{next(iter(module.parametrizations))} is parametrized (torch.nn.utils."
                f"parametrize): the first values of its originals follow from a weight that no process has. Give the "
                f"model an attribute initialise(name, tensor) that fills the originals too, or compute the weight in "
                f"forward",
            )


def parametrization_message(error: BaseException) -> str | None:
    """Return a message for an error inside torch.nn.utils' parametrizations, which read values; otherwise None."""
    frame = error.__traceback__
    while frame is not None:
        if f"torch{os.sep}nn{os.sep}utils{os.sep}" in frame.tb_frame.f_code.co_filename:
            return (
                f"torch.nn.utils looks at the values of a weight ({type(error).__name__}: {error}), and parameters "
                f"have none while the model is built. Compute the weight in forward, from a parameter that "
                f"reset_parameters() fills"
            )
        frame = frame.tb_next
    return None


def check_attributes(path: str, layers: nn.Sequential) -> None:
    """Check the types of the attributes that a model may carry."""
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
            raise ModelError(
                "MW-MODEL-019", f"{path}: model.{attribute} is a {type(found).__name__}; write it as {example}"
            )
    if not callable(getattr(layers, "initialise", len)):
        raise ModelError("MW-MODEL-020", f"{path}: model.initialise is no function of (parameter name, tensor)")
    if getattr(layers, "loss", None) is not None and not callable(getattr(layers, "loss", None)):
        raise ModelError("MW-MODEL-021", f"{path}: model.loss is no function of (output of the last layer, labels)")
    heads = getattr(layers, "loss_heads", None) or ()
    pairs = [tuple(head) if isinstance(head, list | tuple) and len(head) == 2 else (-1, 0) for head in heads]
    fits = all(type(i) is int and i >= 0 and isinstance(w, int | float) and 0 <= w < math.inf for i, w in pairs)
    if pairs and not (fits and pairs[0][0] == 0 < pairs[0][1] and getattr(layers, "loss", None) is None):
        raise ModelError(
            "MW-MODEL-034",
            f"{path}: model.loss_heads = {heads!r}: it holds (shift of the labels, weight of the loss) of each logits "
            f"that the last layer returns, such as [(0, 1.0), (1, 0.1)], the first with shift 0 and a weight above 0; "
            f"a model with its own model.loss adds up its heads there",
        )
    for option in LOSS_OPTIONS:
        given = getattr(layers, option, 0)
        fits = isinstance(given, int | float) and 0 <= given < (1 if option == "label_smoothing" else math.inf)
        if not fits or (given and getattr(layers, "loss", None) is not None):
            raise ModelError(
                "MW-MODEL-027",
                f"{path}: model.{option} = {given!r}: it is a number, at least 0 (label_smoothing also below 1), and "
                f"an option of the default cross-entropy: a model with its own model.loss adds it there",
            )


def tied_sets(path: str, layers: nn.Sequential) -> list[tuple[str, ...]]:
    """Return the declared tied sets, merged if they share a name, each with its canonical name first.

    A set as declared keeps its order. Merged sets follow the model's order.
    """
    parameters = dict(layers.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    sets: list[tuple[str, ...]] = []
    for declared in getattr(layers, "tied_weights", []):
        if isinstance(declared, str):
            raise ModelError(
                "MW-MODEL-022", f"{path}: tied_weights holds {declared!r}; each tie is a tuple of parameter names"
            )
        names = tuple(declared)
        for name in names:
            if name not in shapes:
                close = difflib.get_close_matches(str(name), shapes, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ModelError(
                    "MW-MODEL-023", f"{path}: tied_weights names {name!r}, which is no parameter of the model{hint}"
                )
        sharing = [other for other in sets if set(other) & set(names)]
        if sharing:
            sets = [other for other in sets if other not in sharing]
            members = set(names).union(*sharing)
            names = tuple(name for name in shapes if name in members)
        sets.append(names)
    for names in sets:
        if len({shapes[name] for name in names}) > 1:
            found = ", ".join(f"{name} is {shapes[name]}" for name in names)
            raise ModelError("MW-MODEL-024", f"{path}: tied weights are one weight and have one shape, but {found}")
        frozen = [name for name in names if not parameters[name].requires_grad]
        if frozen and len(frozen) < len(names):
            raise ModelError(
                "MW-MODEL-047",
                f"{path}: tied weights are one weight, but of {', '.join(names)} only {', '.join(frozen)} has "
                f"requires_grad = False: freeze all of them, or none",
            )
    return sets


def check_ties_declared(path: str, layers: nn.Sequential, tied: list[tuple[str, ...]]) -> None:
    """Require a declaration for each weight shared between layers, because each pipeline stage holds its own copy."""
    seen: dict[int, str] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name and not any(first in group and name in group for group in tied):
            raise ModelError(
                "MW-MODEL-025",
                f"{path}: {first} and {name} are one parameter, but tied_weights does not say so: a stage that holds "
                f"only one of them would train it alone. Set model.tied_weights = [({first!r}, {name!r})]",
            )


def check_buffers(path: str, layers: nn.Sequential) -> None:
    """Require real buffers. A buffer computed from a parameter is not, because parameters have no values yet."""
    for name, buffer in layers.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                "MW-MODEL-026",
                f"{path}: buffer {name} is made out of a parameter, which has no value while the model is built: "
                f"compute it from constants in __init__, or from the parameter in forward",
            )
