"""Modules of a sharding plan without split parameters:
each rank runs them on some or all of the activations.

    pattern            kind        what it is                                     activations it works on
    "*.position"       sequence    output cut under sequence parallelism          positions -> whole
    "*.drop_scores"    heads       works on this rank's heads; dropouts           (B, H/tp, ...)
                                   draw their part of the mask along dim 1
    "*.drop_hidden"    features    dropouts draw their part along the last dim    (B, S, F/tp)
    "*.norm_of_q"      uncut       works on all features, between column_whole    full, not split
                                   and row_whole: all ranks compute it alike
    "*.attention"      gather      under sequence parallelism its first input is  cut -> whole for its columns, which
                                   gathered once before it, not by each column    then do not communicate;
                                                                                  rows (N, D): token by token
    "*.mixer"          gather_cut  not split, and mixes tokens: under sequence    cut -> whole -> cut; all ranks
                                   parallelism its first input is gathered        compute alike, gradients are
                                   before it, and its output cut after it         those of a rank's rows
    "*.router"         router      scores of the experts, replicated              whole -> whole, token by token

Kinds for other axes. For tensor parallelism ``context`` is like ``heads``, and the others are like
``replicate``:

    "*.core"           context     attention core (q, k, v, ...), on heads        (B, H/tp, ...)
    "*.rotary"         positions   outputs indexed by position                    (.., S, r), the same on all ranks
    "block0"           places      gets its tokens' positions as a keyword        see context_parallel/plan.py
    "*.experts"        experts     dim 0 of each parameter counts the experts,    whole -> whole, token by token
                                   forward(x, ids, weights); never cut by tp
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.expert_parallel.router_tokens import share_router_tokens
from meshwright.mesh.comm import Group
from meshwright.placement.patterns import enclosing
from meshwright.placement.rewrite import ModuleSite, PlacementRule, Replace, stay
from meshwright.seeding import SeededDropout
from meshwright.tensor_parallel.check import SPLITTING, ShardingKind
from meshwright.tensor_parallel.own_rule import change_first
from meshwright.tensor_parallel.regions import cut_sequence, gather_sequence

TENSOR = "tensor"
"""Feature of the rules of this room."""
POSITION_DIM = -2
"""Sequence dim of the output of a module of kind ``sequence``: (S, D) or (B, S, D)."""

ON_HEADS = (ShardingKind.HEADS, ShardingKind.CONTEXT)
"""Kinds of modules that work on this rank's heads, in dim 1."""


def unsplit_rules(plan: Mapping[str, Any], group: Group, sequence: bool) -> Iterator[PlacementRule]:
    """Yield the rules of the modules that are not split: hooks, and masks of dropouts, fit this
    rank's activations.
    """
    hooks: dict[str, Replace] = {}
    if sequence:
        hooks = {
            ShardingKind.GATHER: partial(_hook_gather, group),
            ShardingKind.GATHER_CUT: partial(_hook_gather_cut, group),
            ShardingKind.SEQUENCE: partial(_hook_cut, group),
            ShardingKind.ROUTER: partial(_share_router, group),
        }
    for pattern, kind in plan.items():
        if not callable(kind) and kind not in SPLITTING:
            yield PlacementRule(TENSOR, pattern, kind, hooks.get(kind, stay))
    cut = partial(_cut_mask, group, sequence)
    yield PlacementRule(TENSOR, "*", "dropout", cut, of=SeededDropout)


def _hook_gather(group: Group, site: ModuleSite) -> None:
    site.module.register_forward_pre_hook(partial(_gather_input, group), with_kwargs=True)


def _hook_gather_cut(group: Group, site: ModuleSite) -> None:
    _hook_gather(group, site)
    site.module.register_forward_hook(partial(_cut_first, group))


def _hook_cut(group: Group, site: ModuleSite) -> None:
    site.module.register_forward_hook(partial(_cut_output, group))


def _share_router(group: Group, site: ModuleSite) -> None:
    share_router_tokens(site.module, group)


def _cut_mask(group: Group, sequence: bool, site: ModuleSite) -> None:
    """Make a dropout draw the mask of this rank's part, by the kind of the nearest module."""
    kind = site.kinds[-1] if site.kinds else ShardingKind.REPLICATE
    dropout: Any = site.module
    dropout.parts.tp = group.rank, group.size
    if kind == ShardingKind.OWN:  # its rule has said
        return
    # the sequence is cut after these modules
    whole = kind in (ShardingKind.SEQUENCE, ShardingKind.UNCUT, ShardingKind.GATHER_CUT)
    split = kind in ON_HEADS or (sequence and not whole)
    dim = -1 if kind == ShardingKind.FEATURES else 1
    is_cut = split or kind == ShardingKind.FEATURES
    dropout.shard = (dim, group.rank, group.size) if is_cut else None


def kind_of(name: str, kinds: Mapping[str, str]) -> str:
    """Return the kind of a parameter: that of the nearest module around it that has one."""
    around = [kinds[each] for each in enclosing(name) if each in kinds]
    return around[-1] if around else ShardingKind.REPLICATE


def has_partial_gradient(kind: str, sequence: bool) -> bool:
    """Return whether a replicated parameter's gradient is a partial sum,
    of this rank's tokens or heads.
    """
    return kind != ShardingKind.UNCUT and (sequence or kind in (*ON_HEADS, ShardingKind.OWN))


def _cut_output(group: Group, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Cut this rank's part of the sequence from the output of a module of kind ``sequence``.
    No communication.
    """
    return cut_sequence(output, group, POSITION_DIM)


def _cut_first(group: Group, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Cut this rank's part of the sequence from the first output of a module of kind
    ``gather_cut``: (B, S, D) -> (B, S/tp, D). No communication: in backward a rank has the
    gradient of its own rows alone, and the gather before the module sums what they give its input.
    """
    if isinstance(output, Tensor):
        return cut_sequence(output, group, 1)
    first, *others = output
    return (cut_sequence(first, group, 1), *others)


def _gather_input(
    group: Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All-gather the sequence of the first input of a module of kind ``gather`` or ``gather_cut``:
    (B, S/tp, D) -> (B, S, D). Blocks.
    """
    return change_first(partial(gather_sequence, group=group), args, kwargs)
