"""The sharding plan: patterns of module names -> kinds of tensor parallelism,
applied to the whole model.

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

D: (B, S, D), and (B, S/tp, D) under sequence parallelism. F, F/tp: (B, S, F), (B, S, F/tp). A
function in place of a kind is the user's own rule (:mod:`own_rule`). tp above the number of a
column's units (kv heads): :mod:`shared_units`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright.mesh.comm import Group
from meshwright.parameters import ParameterInfo
from meshwright.placement.rewrite import ModuleSite, Placed, PlacementRule, rewrite
from meshwright.placement.ties import Held, check_ties
from meshwright.tensor_parallel.check import SPLITTING, ShardingKind, check_plan
from meshwright.tensor_parallel.layers import ColumnLinear, RowLinear, VocabEmbedding, VocabHead
from meshwright.tensor_parallel.own_rule import Rule, split_by_rule
from meshwright.tensor_parallel.own_rule import SplitLayer as SplitLayer
from meshwright.tensor_parallel.shared_units import SharedColumnLinear, entry_of, share_counts
from meshwright.tensor_parallel.unsplit import (
    TENSOR,
    has_partial_gradient,
    kind_of,
    unsplit_rules,
)
from meshwright.tensor_parallel.whole_layers import (
    ColumnEmbedding,
    WholeColumnLinear,
    WholeRowLinear,
)

COLUMNS = {
    ShardingKind.COLUMN: ColumnLinear,
    ShardingKind.VOCAB: VocabHead,
    ShardingKind.COLUMN_WHOLE: WholeColumnLinear,
}
ROWS = {ShardingKind.ROW: RowLinear, ShardingKind.ROW_WHOLE: WholeRowLinear}


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

    Planned linears and embeddings are replaced under their names. Parameters that were one object
    stay one object. Seeded dropouts draw the mask of this rank's part of the activation. With a
    group of one, nothing is replaced.

    Returns:
        the shape, slice and reduction of every parameter, by name.

    Raises:
        ModelError: the plan does not fit the model, see
            :func:`meshwright.tensor_parallel.check.check_plan`, or a tied weight.
    """
    check_plan(model, plan, group.size, sequence, divisible, shared)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    if group.size == 1:
        return {name: ParameterInfo(name, shape) for name, shape in shapes.items()}
    found = rewrite(model, list(_rules(plan, group, sequence, shared)))
    share_counts(model)
    infos, held = {}, {}
    for name, shape in shapes.items():
        part, kind = found.slices.get(name), kind_of(name, found.kinds)
        # a whole parameter that only saw this rank's part of the sequence, such as a norm's
        is_partial = part is None and has_partial_gradient(kind, sequence)
        infos[name] = ParameterInfo(name, shape, part, is_partial)
        held[name] = Held(part, is_partial, kind)
    check_ties(held, tied, "parallel.tp")
    return infos


def _rules(
    plan: Mapping[str, str | Rule], group: Group, sequence: bool, shared: Mapping[str, Any]
) -> Iterator[PlacementRule]:
    """Yield the rules of a sharding plan."""
    for pattern, kind in plan.items():
        if not isinstance(kind, str):
            split_own = partial(_split_own, kind, group, sequence)
            yield PlacementRule(TENSOR, pattern, ShardingKind.OWN, split_own, is_deep=True)
        elif kind in SPLITTING:
            split = partial(_split, ShardingKind(kind), group, sequence, shared)
            yield PlacementRule(TENSOR, pattern, kind, split)
    yield from unsplit_rules(plan, group, sequence)


def _split_own(rule: Rule, group: Group, sequence: bool, site: ModuleSite) -> Placed:
    """Return this rank's part of a layer with a rule of the user's."""
    gathered = sequence and ShardingKind.GATHER in site.kinds
    return split_by_rule(site.name, site.module, rule, group, sequence=sequence, gathered=gathered)


def _split(
    kind: ShardingKind, group: Group, sequence: bool, shared: Mapping[str, Any], site: ModuleSite
) -> Placed:
    """Return this rank's part of a linear or an embedding."""
    plain, gathered = site.module, sequence and ShardingKind.GATHER in site.kinds
    split: ColumnLinear | RowLinear | VocabEmbedding | ColumnEmbedding
    if isinstance(plain, nn.Embedding):
        if kind is ShardingKind.COLUMN:
            split = ColumnEmbedding(plain, group)
        else:
            split = VocabEmbedding(plain, group, sequence)
        return Placed(split, split.slices)
    assert isinstance(plain, nn.Linear)
    units = entry_of(site.name, shared) if kind is ShardingKind.COLUMN else None
    if kind in ROWS:
        split = ROWS[kind](plain, group, sequence)
    elif units is not None and units.sharers(plain.out_features, group.size) > 1:
        split = SharedColumnLinear(plain, group, sequence, gathered, units=units)
    else:
        split = COLUMNS[kind](plain, group, sequence, gathered)
    return Placed(split, split.slices)
