"""Matrices of a model for an optimizer that steps each as a whole: the weights that it steps,
and their split into matrices.

    model.matrices = {"block*.attention.qkv": (2 * d, d, d), "*.gate": "adamw"}        patterns of names

    (2 * d, d, d)    rows of a weight    | q q | k | v | q q | k | v | ...    each of q, k, v is one matrix
    ("columns", d)   the same of the columns of transposed weights of experts (E, inputs, outputs), in equal parts
    "whole"          one matrix
    "adamw"          none: AdamW steps the weight element by element

The first matching pattern applies. A weight of two dims without an entry is one matrix. Exceptions
are embeddings, the last layer (the head), modules of kind "vocab", and weights tied to one of
these. Shapes are those of the whole model, never of a rank's slice.

A weight of three dims (E, rows, columns) is E weights of two dims, and an entry gives the rows of
one of them. Without an entry it is E matrices in a module of kind "experts"; elsewhere AdamW steps
it. AdamW also steps the experts' biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from meshwright.config import Optimizer, ParameterGroup
from meshwright.config.optimizers import DEFAULT
from meshwright.errors import ModelError
from meshwright.placement.patterns import check_patterns, enclosing, entries_for, fits

WHOLE, ADAMW, COLUMNS = "whole", "adamw", "columns"


def find_matrices(
    layers: nn.Sequential,
    canonical: Callable[[str], str],
    plan: Mapping[str, Any],
    groups: Mapping[str, ParameterGroup],
    optimizer: Optimizer,
) -> dict[str, tuple[int, ...]]:
    """Return canonical name of each weight that is stepped as matrices -> rows of its parts (negative:
    columns); (): one matrix.

    Args:
        groups: canonical name -> its parameter group.
        optimizer: the result is empty unless it steps matrices.

    Raises:
        ModelError: an entry of ``model.matrices`` fits no weight, there is no matrix, or a matrix
            has an eps_factor.
    """
    if optimizer.spec.unit != "matrix":
        return {}
    chosen = f'optimizer.name = "{optimizer.name}"'
    names: dict[str, list[str]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        if parameter.dim() in (2, 3) and parameter.requires_grad:
            names.setdefault(canonical(name), []).append(name)
    entries = _entries(layers, list(names))
    found = {}
    for name, copies in names.items():
        shape = layers.get_parameter(name).shape
        is_batch = any(_is_experts(copy, plan) for copy in copies)
        has_none = is_batch != (len(shape) == 3) or any(
            _is_vocabulary(layers, copy, plan) for copy in copies
        )
        default = ADAMW if has_none else WHOLE
        declared = next(
            (rows for pattern, rows in entries.items() if _fits(name, pattern)), default
        )
        if declared != ADAMW:
            found[name] = () if declared == WHOLE else _checked(name, shape, declared)
    if not found:
        what = (
            "the model has no matrix to step as a whole: no trained 2-D weight besides the"
            " embeddings and the head"
        )
        raise ModelError("MW-MODEL-042", f'{chosen}, but {what}; choose "{DEFAULT}"')
    scaled = next((name for name in found if name in groups and groups[name].eps_factor != 1), None)
    if scaled is not None:
        what = f"{scaled} has an eps_factor (muP sets them, and learning rates for AdamW)"
        raise ModelError("MW-MODEL-043", f"{what}, but {chosen} has no eps there: leave one out")
    return found


def _entries(layers: nn.Sequential, names: Sequence[str]) -> Mapping[str, Any]:
    """Return ``model.matrices``. Raise ModelError for a pattern that matches no weight
    of two or three dims.
    """
    entries: Mapping[str, Any] = getattr(layers, "matrices", None) or {}
    frozen = [
        name
        for name, each in layers.named_parameters()
        if not each.requires_grad and each.dim() in (2, 3)
    ]
    # a pattern may also name the module that has the weight
    named = [each for name in (*names, *frozen) for each in (name.rpartition(".")[0], name)]
    check_patterns("model.matrices", entries, named, "weight of two or three dims")
    return entries


def _fits(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter's name, or that of its module."""
    return fits(name, pattern) or fits(name.rpartition(".")[0], pattern)


def _is_vocabulary(layers: nn.Sequential, name: str, plan: Mapping[str, Any]) -> bool:
    """Return whether a parameter belongs to an embedding, the last layer,
    or a module of kind "vocab".
    """
    module, *_, (last, _) = (
        name.rpartition(".")[0],
        *layers.named_parameters(remove_duplicate=False),
    )
    is_planned = "vocab" in entries_for(module, plan)
    is_last = name.partition(".")[0] == last.partition(".")[0]
    return is_planned or is_last or isinstance(layers.get_submodule(module), nn.Embedding)


def _is_experts(name: str, plan: Mapping[str, Any]) -> bool:
    """Return whether a parameter is in a module of kind "experts"."""
    return any("experts" in entries_for(module, plan) for module in enclosing(name))


def _checked(name: str, shape: Sequence[int], rows: Any) -> tuple[int, ...]:
    """Return the rows of an entry, or its columns as negative numbers.
    Raise ModelError if the weight does not fit.
    """
    num_rows, sign = shape[-2], 1
    has_columns = isinstance(rows, list | tuple) and tuple(rows[:1]) == (COLUMNS,)
    if has_columns and len(shape) == 3 and len(set(rows)) == 2:  # of equal parts
        num_rows, rows, sign = shape[-1], rows[1:], -1
    is_rows = isinstance(rows, list | tuple) and all(
        type(number) is int and number > 0 for number in rows
    )
    if is_rows and rows and num_rows % sum(rows) == 0:
        return tuple(sign * number for number in rows)
    raise ModelError(
        "MW-MODEL-045",
        f'model.matrices gives {name}, which has {num_rows} rows, {rows!r}: it takes "{WHOLE}",'
        f' "{ADAMW}", or the rows of the parts of a unit that repeats, such as (128, 64, 64), whose'
        f' sum divides the rows. Transposed weights of experts take ("{COLUMNS}", 64, 64), in equal'
        " parts",
    )
