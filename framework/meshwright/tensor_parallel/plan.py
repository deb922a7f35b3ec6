"""The sharding plan: patterns of module names -> kinds of tensor parallelism, applied to the whole model.

    pattern            kind           what happens with tp > 1                    activations
    "block*.up"        column         nn.Linear, output rows split                D -> F/tp
    "block*.down"      row            nn.Linear, input columns split              F/tp -> D
    "embedding.tokens" vocab          nn.Embedding, rows split                    ids -> D
    "head"             vocab          nn.Linear, output rows split, padded        D -> logits, V/tp
    "*.relative_bias"  column         nn.Embedding, features split                ids -> F/tp
    "block*.qkv"       column_whole   as column, output all-gathered              D -> F
    "block*.out"       row_whole      as row, takes its slice of the input        F -> D
    ...                ...            kinds that split no parameter: unsplit.py
    all else           replicate      the same on all ranks

D: (B, S, D), and (B, S/tp, D) under sequence parallelism. F, F/tp: (B, S, F), (B, S, F/tp). A function in place of a
kind is the user's own rule (:mod:`own_rule`). tp above the number of a column's units (kv heads): :mod:`shared_units`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright.mesh.comm import Group
from meshwright.parameters import ParameterInfo, Slice
from meshwright.seeding import HOOKS
from meshwright.tensor_parallel.check import SPLITTING, PlannedModule, ShardingKind, check_plan
from meshwright.tensor_parallel.layers import ColumnLinear, RowLinear, VocabEmbedding, VocabHead
from meshwright.tensor_parallel.own_rule import Rule, check_ties, split_by_rule
from meshwright.tensor_parallel.own_rule import SplitLayer as SplitLayer
from meshwright.tensor_parallel.shared_units import SharedColumnLinear, share_counts
from meshwright.tensor_parallel.unsplit import check_tied_gradients, fit_unsplit, has_partial_gradient, kind_of
from meshwright.tensor_parallel.whole_layers import ColumnEmbedding, WholeColumnLinear, WholeRowLinear

COLUMNS = {
    ShardingKind.COLUMN: ColumnLinear,
    ShardingKind.VOCAB: VocabHead,
    ShardingKind.COLUMN_WHOLE: WholeColumnLinear,
}
ROWS = {ShardingKind.ROW: RowLinear, ShardingKind.ROW_WHOLE: WholeRowLinear}

CARRIED = ("_modules", *HOOKS)
"""Attributes that the new module takes over from the replaced one: adapters and hooks."""

Slices = dict[str, Slice | None]
"""Parameter name -> slice that this rank holds; None: it holds the whole parameter."""


def apply(
    model: nn.Sequential,
    plan: Mapping[str, str | Rule],
    tied: Sequence[tuple[str, ...]],
    group: Group,
    sequence: bool,
    divisible: Mapping[str, int],
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, ParameterInfo]:
    """Split the whole model (meta or real) over the tp group, in place. No communication.

    Planned linears and embeddings are replaced under their names. Parameters that were one object stay one object.
    Seeded dropouts draw the mask of this rank's part of the activation. With a group of one, nothing is replaced.

    Returns:
        the shape, slice and reduction of every parameter, by name.

    Raises:
        ModelError: the plan does not fit the model, see :func:`meshwright.tensor_parallel.check.check_plan`.
    """
    placements = check_plan(model, plan, tied, group.size, sequence, divisible, shared)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    if group.size == 1:
        return {name: ParameterInfo(name, shape) for name, shape in shapes.items()}
    slices = _swap(model, placements, group, sequence)
    fit_unsplit(model, placements, group, sequence)
    kinds = {name: kind_of(name, placements) for name in shapes}
    check_ties(slices, [name for name, kind in kinds.items() if kind is ShardingKind.OWN], tied)
    infos = {}
    for name, shape in shapes.items():
        part = slices.get(name)
        infos[name] = ParameterInfo(name, shape, part, part is None and has_partial_gradient(kinds[name], sequence))
    check_tied_gradients(infos, kinds, tied)
    return infos


def _swap(model: nn.Sequential, placements: Mapping[str, PlannedModule], group: Group, sequence: bool) -> Slices:
    """Replace the modules that are split; return the slice of each of their parameters by full name.

    A module or parameter that is used twice in the model stays one object.
    """
    swapped: dict[int, tuple[nn.Module, Slices]] = {}
    parameters: dict[int, nn.Parameter] = {}
    slices: Slices = {}
    for name, placement in placements.items():
        plain = placement.module
        if placement.kind not in SPLITTING and placement.rule is None:
            continue
        if id(plain) not in swapped:
            around = [other.kind for other in placements.values() if name.startswith(f"{other.name}.")]
            gathered = sequence and ShardingKind.GATHER in around
            new, parts = swapped[id(plain)] = _split(placement, group, sequence, gathered)
            for path, parameter in plain.named_parameters(recurse=placement.rule is not None):
                owner, _, attribute = path.rpartition(".")
                one = parameters.setdefault(id(parameter), new.get_parameter(path))
                setattr(new.get_submodule(owner), attribute, one)
        new, parts = swapped[id(plain)]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
        slices |= {f"{name}.{path}": part for path, part in parts.items()}
    share_counts(model)
    return slices


def _split(placement: PlannedModule, group: Group, sequence: bool, gathered: bool) -> tuple[nn.Module, Slices]:
    """Return this rank's part of a module, and the slices of its parameters by name."""
    plain, kind = placement.module, placement.kind
    if placement.rule is not None:
        return split_by_rule(placement.name, plain, placement.rule, group, sequence=sequence, gathered=gathered)
    new: ColumnLinear | RowLinear | VocabEmbedding | ColumnEmbedding
    if isinstance(plain, nn.Embedding):
        is_column = kind is ShardingKind.COLUMN
        new = ColumnEmbedding(plain, group) if is_column else VocabEmbedding(plain, group, sequence)
    else:
        assert isinstance(plain, nn.Linear)
        if kind in ROWS:
            new = ROWS[kind](plain, group, sequence)
        elif placement.shared is not None:
            new = SharedColumnLinear(plain, group, sequence, gathered, units=placement.shared)
        else:
            new = COLUMNS[kind](plain, group, sequence, gathered)
    new.train(plain.training)
    for attribute in CARRIED:
        setattr(new, attribute, getattr(plain, attribute))
    return new, new.slices
