"""The sharding plan: patterns of module names -> kinds of tensor parallelism, applied to the whole model.

    pattern            kind        what happens with tp > 1                       activations it works on
    "block*.up"        column      nn.Linear, output rows split                   whole -> split
                                   (shared_units.py: more ranks than units)
    "block*.down"      row         nn.Linear, input columns split                 split -> whole
    "block*.qkv"       column_whole   the same, output all-gathered               whole -> full, not split
    "block*.out"       row_whole      the same, takes its slice of the input      full, not split -> whole
    "*.relative_bias"  column      nn.Embedding, features split                   ids -> (..., F/tp)
    "embedding.tokens" vocab       nn.Embedding, rows split                       ids -> whole
    "head"             vocab       nn.Linear, output rows split, padded           whole -> logits (B, S, V/tp)
    "*.position"       sequence    output cut under sequence parallelism          positions -> whole
    "*.drop_scores"    heads       parameters see some of the heads, dropouts     (B, H/tp, ...)
                                   draw their part of the mask along dim 1
    "*.drop_hidden"    features    dropouts draw their part along the last dim     (B, S, F/tp)
    "*.norm_of_q"      uncut       works on all features, between column_whole    full, not split
                                   and row_whole: all ranks compute it alike
    "*.attention"      gather      under sequence parallelism its first input is  cut -> whole for its columns, which
                                   gathered before it, and not by its columns     then do not communicate
    "*.core"           context     attention core (q, k, v, ...), on heads; of      (B, H/tp, ...)
    "*.rotary"         positions   outputs by position, and a module that takes    (.., S, r), the same on all ranks
    "block0"           places      its tokens' places: context_parallel/plan
    "*.experts"        experts     dim 0 of each parameter counts the experts,     whole -> whole, token by token
                                   forward(x, ids, weights); never cut by tp
    "*.router"         router      scores of the experts, also whole on each rank  whole -> whole, token by token
    all else           replicate   the same on all ranks

"Whole" is (B, S, D), and (B, S/tp, D) under sequence parallelism; "split" is (B, S, F/tp) in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from meshwright.mesh.comm import Group, sum_tokens_over
from meshwright.parameters import ParameterInfo, Slice
from meshwright.seeding import SeededDropout
from meshwright.tensor_parallel.check import SPLITTING, PlannedModule, ShardingKind, check_plan
from meshwright.tensor_parallel.layers import ColumnLinear, RowLinear, VocabEmbedding, VocabHead
from meshwright.tensor_parallel.own_rule import Rule, change_first, check_ties, split_by_rule
from meshwright.tensor_parallel.own_rule import SplitLayer as SplitLayer
from meshwright.tensor_parallel.regions import cut_sequence, gather_sequence
from meshwright.tensor_parallel.shared_units import SharedColumnLinear
from meshwright.tensor_parallel.whole_layers import ColumnEmbedding, WholeColumnLinear, WholeRowLinear

POSITION_DIM = -2
"""Sequence dim of the output of a module of kind ``sequence``: (S, D) or (B, S, D)."""

ON_HEADS = (ShardingKind.HEADS, ShardingKind.CONTEXT)
"""Kinds of modules that see some of the heads, in dim 1."""

COLUMNS = {
    ShardingKind.COLUMN: ColumnLinear,
    ShardingKind.VOCAB: VocabHead,
    ShardingKind.COLUMN_WHOLE: WholeColumnLinear,
}
ROWS = {ShardingKind.ROW: RowLinear, ShardingKind.ROW_WHOLE: WholeRowLinear}

CARRIED = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
"""Attributes of a replaced module that the new one keeps: an adapter, and the hooks of context parallelism."""

Swapped = ColumnLinear | RowLinear | VocabEmbedding | ColumnEmbedding


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
    Seeded dropouts get the part of the activation that this rank holds. With a group of one, nothing is replaced.

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
    for name, module in model.named_modules():
        kind = _kind_of(name, placements)
        if sequence and name in placements and kind is ShardingKind.GATHER:
            module.register_forward_pre_hook(partial(_gather_input, group), with_kwargs=True)
        if sequence and name in placements and kind is ShardingKind.SEQUENCE:
            module.register_forward_hook(partial(_cut_output, group))
        if sequence and name in placements and kind is ShardingKind.ROUTER:
            sum_tokens_over(module, group)
        if isinstance(module, SeededDropout) and kind is not ShardingKind.OWN:
            whole = kind in (ShardingKind.SEQUENCE, ShardingKind.UNCUT)  # the sequence is cut after these modules
            split = kind in ON_HEADS or (sequence and not whole)
            module.shard = (1, group.rank, group.size) if split else None
            if kind is ShardingKind.FEATURES:
                module.shard = (-1, group.rank, group.size)
    check_ties(slices, [name for name in shapes if _kind_of(name, placements) is ShardingKind.OWN], tied)
    infos = {}
    for name, shape in shapes.items():
        part = slices.get(name)
        kind = _kind_of(name, placements)
        of_part = sequence or kind in (*ON_HEADS, ShardingKind.OWN)
        partial_sum = part is None and kind is not ShardingKind.UNCUT and of_part
        infos[name] = ParameterInfo(name, shape, part, partial_sum)
    return infos


def _swap(
    model: nn.Sequential, placements: Mapping[str, PlannedModule], group: Group, sequence: bool
) -> dict[str, Slice | None]:
    """Replace the modules that are split; return the slice of each of their parameters by full name."""
    swapped: dict[
        int, tuple[nn.Module, dict[str, Slice | None]]
    ] = {}  # a module or parameter used twice in the model stays one object
    parameters: dict[int, nn.Parameter] = {}
    slices: dict[str, Slice | None] = {}
    for name, placement in placements.items():
        plain = placement.module
        if placement.kind not in SPLITTING and placement.rule is None:
            continue
        if id(plain) not in swapped:
            around = [other.kind for other in placements.values() if name.startswith(f"{other.name}.")]
            gathered = sequence and ShardingKind.GATHER in around
            if placement.rule is not None:
                new, parts = split_by_rule(name, plain, placement.rule, group, sequence=sequence, gathered=gathered)
            else:
                new = _split(placement, group, sequence, gathered).train(plain.training)
                for attribute in CARRIED:
                    setattr(new, attribute, getattr(plain, attribute))
                parts = new.slices
                if isinstance(new, SharedColumnLinear):
                    new.share_count(model.get_submodule(name.rpartition(".")[0]))
            swapped[id(plain)] = new, parts
            for attribute, parameter in plain.named_parameters(recurse=placement.rule is not None):
                owner, _, child = attribute.rpartition(".")
                setattr(
                    new.get_submodule(owner), child, parameters.setdefault(id(parameter), new.get_parameter(attribute))
                )
        parent, _, child = name.rpartition(".")
        new, parts = swapped[id(plain)]
        setattr(model.get_submodule(parent), child, new)
        slices |= {f"{name}.{attribute}": slice_ for attribute, slice_ in parts.items()}
    return slices


def _split(placement: PlannedModule, group: Group, sequence: bool, gathered: bool) -> Swapped:
    plain, kind = placement.module, placement.kind
    if isinstance(plain, nn.Embedding):
        if kind is ShardingKind.COLUMN:
            return ColumnEmbedding(plain, group)
        return VocabEmbedding(plain, group, sequence)
    assert isinstance(plain, nn.Linear)
    if kind in ROWS:
        return ROWS[kind](plain, group, sequence)
    if placement.shared is not None:
        return SharedColumnLinear(plain, group, sequence, gathered, units=placement.shared)
    return COLUMNS[kind](plain, group, sequence, gathered)


def _cut_output(group: Group, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Cut this rank's part of the sequence from the output of a module of kind ``sequence``. No communication."""
    return cut_sequence(output, group, POSITION_DIM)


def _gather_input(
    group: Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All-gather the sequence of the first input of a module of kind ``gather``: (B, S/tp, D) -> (B, S, D). Blocks."""
    return change_first(partial(gather_sequence, group=group), args, kwargs)


def _kind_of(name: str, placements: Mapping[str, PlannedModule]) -> ShardingKind:
    """Return the kind of a module or parameter: its own, or that of the nearest enclosing module that has one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        placement = placements.get(".".join(parts[:length]))
        if placement is not None:
            return placement.kind
    return ShardingKind.REPLICATE
