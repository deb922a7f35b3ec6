"""Tensor parallelism of a user's own layer: a sharding rule,
a function in place of a kind in the plan.

    model.sharding_plan = {"block*.mlp": split_groups, ...}

    def split_groups(layer, tp_rank, tp):  # a copy of the layer, with full parameters on meta
        layer.num_groups //= tp            # numbers that its forward reads: set those of one rank
        return SplitLayer({"up": 0, "down": 0}, input="whole", output="sum")

The framework cuts the named parameters and communicates around the layer:

    input     without sequence parallelism       with it                         backward
    "whole"   -                                  all-gather (B, S/tp, D)         all-reduce, or reduce-scatter
    "split"   -                                  -                               -
    output
    "sum"     all-reduce                         reduce-scatter (B, S, D)        -, or all-gather
    "split"   -                                  -                               -

The outputs of the ranks must add up to the plain layer's output ("sum"), or be its parts along the
last dim ("split"). The gradient of a parameter that is not cut is then the sum of the ranks'
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.errors import ModelError
from meshwright.mesh.comm import Group
from meshwright.parameters import Slice
from meshwright.placement.rewrite import Placed, copy_of
from meshwright.seeding import SeededDropout
from meshwright.tensor_parallel.layers import even_slice
from meshwright.tensor_parallel.regions import (
    copy_in,
    gather_sequence,
    reduce_out,
    reduce_scatter_sequence,
)


class SplitLayer(NamedTuple):
    """Split of one layer over the tp ranks, as a sharding rule ``rule(layer, tp_rank,
    tp)`` returns it.

    A dict of these fields does as well, for a model that imports nothing of the framework.
    """

    dims: Mapping[str, int]
    """Name of a parameter in the layer -> the dim that is cut into tp equal parts.
    Others stay whole on every rank.
    """
    input: Literal["whole", "split"] = "whole"
    """First input: "whole", the same on all ranks; or "split" along its last dim,
    as a column linear leaves it.
    """
    output: Literal["sum", "split"] = "sum"
    """Output: "sum", which is added up over the ranks; or "split" along its last dim,
    as a row linear takes it.
    """
    dropout_dims: Mapping[str, int] = {}
    """Name of an nn.Dropout in the layer -> the dim of its input that is cut.
    Others see whole activations.
    """


Rule = Callable[[nn.Module, int, int], SplitLayer]


def split_by_rule(
    name: str, plain: nn.Module, rule: Rule, group: Group, *, sequence: bool, gathered: bool
) -> Placed:
    """Return a copy of a layer as this rank runs it, with whole parameters, and their slices.
    No communication.

    Args:
        name: name of the layer, for messages.
        plain: the layer with whole parameters (meta or real); not changed.
        sequence: sequence parallelism is on. ``gathered``: an enclosing module gathers the
            sequence.

    Raises:
        ModelError: the rule fails, or what it returns does not fit the layer.
    """
    layer = copy_of(plain)
    title = (
        f"sharding rule {getattr(rule, '__qualname__', rule)} of {name} ({type(plain).__name__})"
    )
    try:
        split = rule(layer, group.rank, group.size)
    except Exception as error:
        raise ModelError("MW-TP-003", f"{title} failed: {type(error).__name__}: {error}") from error
    if isinstance(split, dict) and "dims" in split and split.keys() <= set(SplitLayer._fields):
        split = SplitLayer(**split)
    if problems := list(_problems(plain, layer, split, group.size)):
        raise ModelError("MW-TP-004", "\n".join(f"{title}: {problem}" for problem in problems))
    slices: dict[str, Slice | None] = {}
    for path, whole in plain.named_parameters(remove_duplicate=False):
        dim = split.dims.get(path)
        slices[path] = None
        if dim is not None:
            slices[path] = even_slice(dim, whole.shape[dim], group.rank, group.size)
    for path, module in layer.named_modules():
        if isinstance(module, SeededDropout):
            cut_dim = split.dropout_dims.get(path)
            module.shard = None if cut_dim is None else (cut_dim, group.rank, group.size)
    if split.input == "whole" and not (sequence and gathered):
        layer.register_forward_pre_hook(partial(_enter, title, group, sequence), with_kwargs=True)
    if split.output == "sum":
        layer.register_forward_hook(partial(_leave, title, group, sequence))
    return Placed(layer, slices)


def _problems(plain: nn.Module, layer: nn.Module, split: Any, tp: int) -> list[str]:
    """Return the problems of a rule's result; empty: it fits the layer."""
    if not isinstance(split, SplitLayer):
        return [
            f"returned a {type(split).__name__}: return meshwright.SplitLayer({{parameter: dim}},"
            " input, output)"
        ]
    whole = dict(plain.named_parameters(remove_duplicate=False))
    problems = [
        f"{word} = {value!r}: use one of {', '.join(map(repr, allowed))}"
        for word, value, allowed in (
            ("input", split.input, ("whole", "split")),
            ("output", split.output, ("sum", "split")),
        )
        if value not in allowed
    ]
    shapes = {
        path: tuple(parameter.shape)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
    }
    if shapes != {path: tuple(parameter.shape) for path, parameter in whole.items()}:
        problems.append(
            "changes the parameters: leave them whole, and name them in dims; the framework cuts"
            " them"
        )
    if not split.dims:
        problems.append(
            f"dims is empty: all {tp} ranks would compute the same; name the parameters that"
            " are cut"
        )
    for path, dim in split.dims.items():
        if path not in whole:
            problems.append(
                f"dims names {path!r}, which is no parameter of the layer: it has"
                f" {', '.join(whole)}"
            )
        elif type(dim) is not int or not 0 <= dim < whole[path].dim():
            problems.append(
                f"dims[{path!r}] = {dim!r}: the parameter has dims 0 to {whole[path].dim() - 1}"
            )
        elif whole[path].shape[dim] % tp:
            problems.append(
                f"{path} is {tuple(whole[path].shape)}, and parallel.tp = {tp} does not divide its"
                f" dim {dim}"
            )
    dropouts = [path for path, module in layer.named_modules() if isinstance(module, SeededDropout)]
    for path, dim in split.dropout_dims.items():
        if path not in dropouts or type(dim) is not int:
            problems.append(
                f"dropout_dims[{path!r}] = {dim!r}: it maps a dropout of the layer"
                f" ({', '.join(dropouts) or 'none'}) to a dim"
            )
    return problems


def _enter(
    title: str,
    group: Group,
    sequence: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply copy_in or gather_sequence to the first input, if floating-point: (B, S[/tp], D) -> (B,
    S, D).
    """
    if any(
        isinstance(leaf, Tensor) and leaf.requires_grad
        for leaf in tree_leaves((args[1:], kwargs if args else {}))
    ):
        raise ModelError(
            "MW-TP-006",
            f"{title}: the layer has a second input that needs a gradient, of which each rank would"
            " compute a part: a rule brings in the first input only; combine the two before the"
            " layer",
        )

    def bring_in(first: Any) -> Any:
        if not (isinstance(first, Tensor) and first.is_floating_point()):
            return first
        return gather_sequence(first, group) if sequence else copy_in(first, group)

    return change_first(bring_in, args, kwargs)


def change_first(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a module with the first one changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _leave(
    title: str, group: Group, sequence: bool, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Tensor:
    """Sum the outputs over tp, (B, S, D) -> (B, S, D), under sequence parallelism (B, S/tp, D).
    Blocks.
    """
    if not isinstance(output, Tensor):
        raise ModelError(
            "MW-TP-007",
            f"{title}: the layer returns a {type(output).__name__}; an output that is summed is one"
            " tensor",
        )
    return reduce_scatter_sequence(output, group) if sequence else reduce_out(output, group)
