"""Modules of a sharding plan without split parameters: each rank runs them on some or all of the activations.

    pattern            kind        what it is                                     activations it works on
    "*.position"       sequence    output cut under sequence parallelism          positions -> whole
    "*.drop_scores"    heads       works on this rank's heads; dropouts           (B, H/tp, ...)
                                   draw their part of the mask along dim 1
    "*.drop_hidden"    features    dropouts draw their part along the last dim    (B, S, F/tp)
    "*.norm_of_q"      uncut       works on all features, between column_whole    full, not split
                                   and row_whole: all ranks compute it alike
    "*.attention"      gather      under sequence parallelism its first input is  cut -> whole for its columns, which
                                   gathered once before it, not by each column    then do not communicate
    "*.router"         router      scores of the experts, replicated              whole -> whole, token by token

Kinds for other axes. For tensor parallelism ``context`` is like ``heads``, and the others are like ``replicate``:

    "*.core"           context     attention core (q, k, v, ...), on heads        (B, H/tp, ...)
    "*.rotary"         positions   outputs indexed by position                    (.., S, r), the same on all ranks
    "block0"           places      gets its tokens' positions as a keyword        see context_parallel/plan.py
    "*.experts"        experts     dim 0 of each parameter counts the experts,    whole -> whole, token by token
                                   forward(x, ids, weights); never cut by tp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.mesh.comm import Group, share_router_tokens
from meshwright.parameters import ParameterInfo
from meshwright.seeding import SeededDropout
from meshwright.tensor_parallel.check import PlannedModule, ShardingKind
from meshwright.tensor_parallel.own_rule import change_first
from meshwright.tensor_parallel.regions import cut_sequence, gather_sequence

POSITION_DIM = -2
"""Sequence dim of the output of a module of kind ``sequence``: (S, D) or (B, S, D)."""

ON_HEADS = (ShardingKind.HEADS, ShardingKind.CONTEXT)
"""Kinds of modules that work on this rank's heads, in dim 1."""


def fit_unsplit(model: nn.Sequential, placements: Mapping[str, PlannedModule], group: Group, sequence: bool) -> None:
    """Fit the modules that are not split to this rank's activations, in place: hooks, and masks of dropouts."""
    for name, module in model.named_modules():
        kind = kind_of(name, placements)
        if sequence and name in placements and kind is ShardingKind.GATHER:
            module.register_forward_pre_hook(partial(_gather_input, group), with_kwargs=True)
        if sequence and name in placements and kind is ShardingKind.SEQUENCE:
            module.register_forward_hook(partial(_cut_output, group))
        if sequence and name in placements and kind is ShardingKind.ROUTER:
            share_router_tokens(module, group)
        if isinstance(module, SeededDropout) and kind is not ShardingKind.OWN:
            whole = kind in (ShardingKind.SEQUENCE, ShardingKind.UNCUT)  # the sequence is cut after these modules
            split = kind in ON_HEADS or (sequence and not whole)
            module.shard = (1, group.rank, group.size) if split else None
            if kind is ShardingKind.FEATURES:
                module.shard = (-1, group.rank, group.size)


def kind_of(name: str, placements: Mapping[str, PlannedModule]) -> ShardingKind:
    """Return the kind of a module or parameter: its own, or that of the nearest enclosing module that has one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        placement = placements.get(".".join(parts[:length]))
        if placement is not None:
            return placement.kind
    return ShardingKind.REPLICATE


def has_partial_gradient(kind: ShardingKind, sequence: bool) -> bool:
    """Return whether a replicated parameter's gradient is a partial sum, of this rank's tokens or heads."""
    return kind is not ShardingKind.UNCUT and (sequence or kind in (*ON_HEADS, ShardingKind.OWN))


def check_tied_gradients(
    infos: Mapping[str, ParameterInfo], kinds: Mapping[str, ShardingKind], tied: Sequence[tuple[str, ...]]
) -> None:
    """Refuse a tied weight whose gradient is a partial sum at one of its places, and whole at another.

    Raises:
        ModelError: names the weights and the kinds of their modules.
    """
    for names in tied:
        if len({infos[name].sum_over_tp for name in names}) > 1:
            found = ", ".join(f"{name} is {kinds[name]}" for name in names)
            raise ModelError(
                "MW-TP-008",
                f"tied weights have one gradient, which for some kinds of the sharding_plan is a part on each tp rank, "
                f"but {found}: give their modules the same kind",
            )


def _cut_output(group: Group, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Cut this rank's part of the sequence from the output of a module of kind ``sequence``. No communication."""
    return cut_sequence(output, group, POSITION_DIM)


def _gather_input(
    group: Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All-gather the sequence of the first input of a module of kind ``gather``: (B, S/tp, D) -> (B, S, D). Blocks."""
    return change_first(partial(gather_sequence, group=group), args, kwargs)
