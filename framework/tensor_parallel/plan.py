"""The sharding plan: patterns of module names -> what tensor parallelism does with them, applied to the whole model.

    pattern            kind        what happens with tp > 1                       activations it works on
    "block*.up"        column      nn.Linear, output rows split                   whole -> split
    "block*.down"      row         nn.Linear, input columns split                 split -> whole
    "*.relative_bias"  column      nn.Embedding, features split                   ids -> (..., F/tp)
    "embedding.tokens" vocab       nn.Embedding, rows split                       ids -> whole
    "head"             vocab       nn.Linear, output rows split, padded           whole -> logits (B, S, V/tp)
    "*.position"       sequence    output cut under sequence parallelism          positions -> whole
    "*.drop_scores"    heads       parameters see some of the heads, dropouts     (B, H/tp, ...)
                                   draw their part of the mask along dim 1
    "*.drop_hidden"    features    dropouts draw their part of the mask along      (B, S, F/tp)
                                   the last dim
    all else           replicate   the same on all ranks

"Whole" is (B, S, D), and (B, S/tp, D) under sequence parallelism; "split" is (B, S, F/tp) in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from framework.mesh.comm import Group
from framework.parameters import ParameterInfo, Slice
from framework.seeding import SeededDropout
from framework.tensor_parallel.check import SPLITTING, Kind, Placement, check
from framework.tensor_parallel.layers import ColumnEmbedding, ColumnLinear, RowLinear, VocabEmbedding, VocabHead
from framework.tensor_parallel.regions import cut_sequence

POSITION_DIM = -2
"""The sequence dim of what a module of kind ``sequence`` gives: (S, D) or (B, S, D)."""

Swapped = ColumnLinear | RowLinear | VocabEmbedding | ColumnEmbedding


def apply(
    model: nn.Sequential,
    plan: Mapping[str, str],
    tied: Sequence[tuple[str, ...]],
    group: Group,
    sequence: bool,
    divisible: Mapping[str, int],
) -> dict[str, ParameterInfo]:
    """Split the whole model (meta or real) over the group, in place; what became of every parameter, by name.

    Planned linears and embeddings are replaced under their names, parameters that were one object stay one, seeded
    dropouts learn which part of an activation they see. Says nothing to other ranks. With a group of one, nothing is
    replaced.

    Raises:
        ModelError: the plan does not fit the model, see :func:`framework.tensor_parallel.check.check`.
    """
    placements = check(model, plan, tied, group.size, sequence, divisible)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    if group.size == 1:
        return {name: ParameterInfo(name, shape) for name, shape in shapes.items()}
    slices = _swap(model, placements, group, sequence)
    for name, module in model.named_modules():
        kind = _kind_of(name, placements)
        if sequence and name in placements and kind is Kind.SEQUENCE:
            module.register_forward_hook(partial(_cut_output, group))
        if isinstance(module, SeededDropout):
            split = kind is Kind.HEADS or (sequence and kind is not Kind.SEQUENCE)  # a cut comes after what it cuts
            module.shard = (1, group.rank, group.size) if split else None
            if kind is Kind.FEATURES:
                module.shard = (-1, group.rank, group.size)
    infos = {}
    for name, shape in shapes.items():
        part = slices.get(name)
        partial_sum = part is None and (sequence or _kind_of(name, placements) is Kind.HEADS)
        infos[name] = ParameterInfo(name, shape, part, partial_sum)
    return infos


def _swap(
    model: nn.Sequential, placements: Mapping[str, Placement], group: Group, sequence: bool
) -> dict[str, Slice | None]:
    """Replace the modules that are split; the slice of each of their parameters by full name."""
    swapped: dict[int, Swapped] = {}  # a module, or a parameter, in two places of the model stays one
    parameters: dict[int, nn.Parameter] = {}
    slices: dict[str, Slice | None] = {}
    for name, placement in placements.items():
        plain = placement.module
        if placement.kind not in SPLITTING:
            continue
        if id(plain) not in swapped:
            new = swapped[id(plain)] = _split(plain, placement.kind, group, sequence).train(plain.training)
            for attribute, parameter in plain.named_parameters(recurse=False):
                setattr(new, attribute, parameters.setdefault(id(parameter), new.get_parameter(attribute)))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped[id(plain)])
        slices |= {f"{name}.{attribute}": slice_ for attribute, slice_ in swapped[id(plain)].slices.items()}
    return slices


def _split(plain: nn.Module, kind: Kind, group: Group, sequence: bool) -> Swapped:
    if isinstance(plain, nn.Embedding):
        if kind is Kind.COLUMN:
            return ColumnEmbedding(plain, group)
        return VocabEmbedding(plain, group, sequence)
    assert isinstance(plain, nn.Linear)
    if kind is Kind.ROW:
        return RowLinear(plain, group, sequence)
    return (VocabHead if kind is Kind.VOCAB else ColumnLinear)(plain, group, sequence)


def _cut_output(group: Group, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Forward hook of a module of kind ``sequence``: my part of what it gives, without communication."""
    return cut_sequence(output, group, POSITION_DIM)


def _kind_of(name: str, placements: Mapping[str, Placement]) -> Kind:
    """The kind of a module or parameter: its own, or that of the nearest module around it that has one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        placement = placements.get(".".join(parts[:length]))
        if placement is not None:
            return placement.kind
    return Kind.REPLICATE
