"""Context parallelism of a plain model, by hooks on the modules that its sharding plan names.

    kind        module                              with cp > 1
    vocab       nn.Embedding of token ids           looks up this rank's ids: (B, S) -> (B, S/cp, D)
    sequence    output indexed by position          this rank's rows of it: (.., S, D) -> (.., S/cp, D)
    positions   such as a rotary embedding: reads   called with a view of S tokens as its first input; returns this
                only the length of its first input  rank's rows of the outputs: (.., S, r) -> (..,
                S/cp, r)
    places      called with whole inputs            gets the keyword ``places``, (1 or B, S/cp): its tokens' positions
    context     attention core (q, k, v, ...)       gets k and v of all S tokens, and the keyword ``places``, the
                of shapes (B, heads, tokens, d)     positions (1 or B, S/cp) of its queries in the sample;
                                                    with cp_exchange = "heads" q, k and v of all
                                                    tokens, heads/cp
    router      router of experts                   its counts and capacities span all tokens: router_tokens.py

The first layer gets whole samples, and document starts stay whole on every rank, so that positions
count over the whole sample. Between attentions each rank has its own tokens only. Models without an
attention core in their plan are refused, and so are layers that mix tokens elsewhere, as far as
mixing.py finds them: they would mix this rank's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.config import Parallel
from meshwright.context_parallel.cut import HeadCut, TokenCut
from meshwright.context_parallel.exchange import (
    gather_keys,
    heads_to_tokens,
    in_sample_order,
    tokens_to_heads,
)
from meshwright.context_parallel.grouped import BLOCKS, PLACES, GroupedAttention
from meshwright.context_parallel.key_cache import KeyCache
from meshwright.context_parallel.mixing import check_mixing
from meshwright.errors import ModelError
from meshwright.expert_parallel.router_tokens import share_router_tokens
from meshwright.mesh.comm import Group
from meshwright.model.build import PlainModel
from meshwright.model.sync_batch_norm import synchronised
from meshwright.placement.rewrite import ModuleSite, PlacementRule, rewrite
from meshwright.seeding import SeededDropout

CONTEXT = "context"
"""Feature of the rules of this room."""
CORE = "context"
POSITIONS = "positions"
SEQUENCE = "sequence"
VOCAB = "vocab"
HEADS = "heads"
ROUTER = "router"
TOKEN_DIM = -2
"""Dim of tokens in queries, keys and values, and in outputs indexed by position."""


def share_tokens(
    parallel: Parallel, builder: str, model: PlainModel, inputs: Any, labels: Tensor, group: Group
) -> TokenCut:
    """Register the hooks by which the cp ranks share each sample's tokens, in place;
    return the cut. No communication.

    ``inputs``, ``labels``: of a whole micro-batch, on meta.

    Raises:
        ModelError: the samples cannot be cut evenly, or the model cannot work on parts of them.
    """
    cut = TokenCut(group, parallel.cp_order, labels, model.current)
    parts = parallel.tp if parallel.sequence else 1
    cut.check(builder, inputs, labels, parts=parts, heads=len(model.loss_heads))
    heads = HeadCut(group) if parallel.cp_exchange == "heads" else parallel.cp_head_groups
    apply(builder, model.layers, model.plan, inputs, cut, heads)
    return cut


def apply(
    builder: str,
    model: nn.Sequential,
    plan: Mapping[str, Any],
    inputs: Any,
    cut: TokenCut,
    heads: HeadCut | int | None = None,
) -> None:
    """Register the hooks of the kinds in the plan, in place, and set the cuts of dropouts.
    No communication.

    Call it before tensor parallelism is applied, which then splits this rank's tokens. ``inputs``:
    of a micro-batch.
    ``heads``: the HeadCut if cp_exchange = "heads"; otherwise ``parallel.cp_head_groups``.

    Raises:
        ModelError: the plan names no attention core, or another module mixes tokens.
    """
    if cut.group.size == 1:
        return
    rules = [
        PlacementRule(CONTEXT, pattern, str(kind), partial(_hook, str(kind), cut, heads))
        for pattern, kind in plan.items()
    ]
    cut_mask = partial(_cut_mask, cut, heads)
    rules.append(PlacementRule(CONTEXT, "*", "dropout", cut_mask, of=SeededDropout))
    kinds = rewrite(model, rules).kinds
    if CORE not in kinds.values():
        raise ModelError(
            "MW-CP-002",
            f"{builder}: parallel.cp = {cut.group.size} needs the attention core in the model's"
            " sharding_plan (kind "
            f'"{CORE}"), and it names none: each rank would attend to its own tokens only. Name the'
            " module that is "
            f"called with queries, keys and values (docs/long-context.md), or use parallel.cp = 1",
        )
    planned = {name for name, kind in kinds.items() if kind in (CORE, POSITIONS, SEQUENCE, ROUTER)}
    planned |= {name for name, _ in synchronised(model)}  # over the cp ranks too
    by_hooks = {
        name: kind for name, kind in kinds.items() if kind in (CORE, POSITIONS, SEQUENCE, PLACES)
    }
    check_mixing(builder, model, inputs, planned, cut, by_hooks)


def _cut_mask(cut: TokenCut, heads: HeadCut | int | None, site: ModuleSite) -> None:
    """Make a dropout draw the mask of this rank's tokens, or heads, by the kinds around it."""
    dropout: Any = site.module
    dropout.parts.tokens = cut
    dropout.parts.heads = heads if isinstance(heads, HeadCut) else None
    if {*site.kinds} & {HEADS, CORE}:
        dropout.cut = (1, heads) if isinstance(heads, HeadCut) else (2, cut)
    elif SEQUENCE not in site.kinds:
        dropout.cut = (1, cut)


def _hook(kind: str, cut: TokenCut, heads: HeadCut | int | None, site: ModuleSite) -> None:
    """Register the hooks of a kind, and extend the token functions of a router."""
    name, module = site.name, site.module
    before: Callable[..., Any] | None = None
    if kind == CORE and isinstance(heads, HeadCut):
        before = partial(_take_heads, name, cut, heads)
        module.register_forward_hook(partial(_give_heads, name, cut))
    elif kind == CORE:
        _check_takes_places(name, module)
        if isinstance(cut, KeyCache):
            before = partial(_extend_keys, name, cut)
        else:
            before = partial(_exchange, name, cut, _group_heads(name, module, cut, heads))
    elif kind == PLACES:
        before = partial(_give_places, cut)
    elif kind == VOCAB and isinstance(module, nn.Embedding):
        if module.scale_grad_by_freq:
            raise ModelError(
                "MW-CP-016",
                f"{name} has scale_grad_by_freq set, which counts the tokens of whole samples:"
                " build it without, or use parallel.cp = 1",
            )
        before = partial(_own_ids, cut)
    elif kind == POSITIONS:
        before = partial(_lengthen, cut)
    elif kind == ROUTER and not isinstance(cut, KeyCache):  # it needs other tokens in training only
        share_router_tokens(
            module, cut.group, partial(cut.take, dim=1), partial(_in_sample_order, cut)
        )
    if before is not None:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if kind in (POSITIONS, SEQUENCE):
        module.register_forward_hook(partial(_own_rows, name, kind, cut))


def _check_takes_places(name: str, core: nn.Module) -> None:
    """Raise :class:`ModelError` for a core that cannot attend with some of the queries."""
    if PLACES not in signature(core.forward).parameters:
        raise ModelError(
            "MW-CP-008",
            f"{name} is an attention core by the sharding_plan (kind {CORE!r}), and its forward"
            f" takes no keyword {PLACES!r}: with parallel.cp > 1 it has some queries and all"
            f" keys, and {PLACES} (1 or B, queries) are the positions of the queries among the"
            " keys (docs/long-context.md)",
        )


def _group_heads(
    name: str, core: Any, cut: TokenCut, heads: HeadCut | int | None
) -> GroupedAttention | None:
    """Make a core gather keys group of heads by group of heads, if it declares its blocks."""
    wanted = None if isinstance(heads, HeadCut) else heads
    if hasattr(core, BLOCKS):
        core.forward = grouped = GroupedAttention(
            name, core.forward, getattr(core, BLOCKS), cut, wanted
        )
        return grouped
    if wanted is not None:
        raise ModelError(
            "MW-CP-015",
            f"parallel.cp_head_groups = {wanted} needs attention cores that attend with some of"
            " their heads, and "
            f'{name} does not declare it (a method "{BLOCKS}", docs/long-context.md): leave the'
            " key out",
        )
    return None


def _in_sample_order(cut: TokenCut, ranked: Tensor) -> Tensor:
    """Reorder tokens (S, B, ...) of rank 0, rank 1, .. to the order of the sample."""
    return in_sample_order(ranked, cut.from_ranks(ranked.device))


def groups_of_call(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of groups of heads in which a hooked core gathers keys in a call
    with these arguments.
    """
    is_grouped = (
        isinstance(forward, GroupedAttention) and forward.blocks(*args, **kwargs) is not None
    )
    return forward.num_groups(*args[:2]) if is_grouped else 1


def _give_places(
    cut: TokenCut, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the keyword ``places``: positions of this rank's tokens, (1 or B, S/cp)."""
    device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    return args, {**kwargs, PLACES: cut.positions(device)}


def _own_ids(
    cut: TokenCut, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take this rank's token ids: (B, S) -> (B, S/cp). Ids of another shape stay whole."""
    ids, *others = args
    is_whole = ids.dim() > 1 and ids.shape[1] == cut.length
    return (cut.take(ids, 1) if is_whole else ids, *others), kwargs


def _lengthen(
    cut: TokenCut, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the first input (.., S/cp, d) by a view (.., S, d) that repeats its first token."""
    x, *others = args
    return (
        x.narrow(TOKEN_DIM, 0, 1).expand(*x.shape[:TOKEN_DIM], cut.length, x.shape[-1]),
        *others,
    ), kwargs


def _own_rows(
    name: str, kind: str, cut: TokenCut, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    """Select this rank's rows of outputs that are indexed by position: (.., S, r) -> (.., S/cp,
    r).
    """

    def take(whole: Tensor) -> Tensor:
        if whole.dim() < 2 or whole.shape[TOKEN_DIM] != cut.length:
            raise ModelError(
                "MW-CP-003",
                f"{name} returns {tuple(whole.shape)}, which is not indexed by the {cut.length}"
                " positions of a sample in its last dim but one: give it another kind in the"
                " sharding_plan, or use parallel.cp = 1",
            )
        samples = len(cut.positions(whole.device))
        if samples > 1 and (
            kind == POSITIONS if whole.dim() == 2 else whole.shape[0] not in (1, samples)
        ):
            raise ModelError(
                "MW-CP-011",
                f"{name} returns {tuple(whole.shape)} for {samples} samples, whose tokens"
                " parallel.cp_order = "
                f'"{cut.order}" cuts differently: its first dim must be that of the samples, or 1;'
                " or use "
                f'parallel.cp_order = "zigzag"',
            )
        return cut.take(whole, whole.dim() + TOKEN_DIM)

    return tree_map_only(Tensor, take, output)


def _exchange(
    name: str,
    cut: TokenCut,
    grouped: GroupedAttention | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather keys and values of all tokens, and add the queries' ``places``. Collective over cp;
    blocks.

    Leave the arguments alone if ``grouped`` gathers them in the call, group of heads by group.
    """
    q, k, v, *others = args
    _check_tokens(name, cut, q, k)
    if grouped is not None and grouped.blocks(*args, **kwargs) is not None:
        return args, kwargs
    return (q, *gather_keys(k, v, cut), *others), {**kwargs, PLACES: cut.positions(q.device)}


def _extend_keys(
    name: str, cache: KeyCache, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keep the new tokens' keys and values, and pass those of all tokens. No communication."""
    q, k, v, *others = args
    _check_tokens(name, cache, q, k)
    k, v = cache.extend(name, k, v)
    return (q, k, v, *others), {**kwargs, PLACES: cache.positions(q.device)}


def _check_tokens(name: str, cut: TokenCut, q: Tensor, k: Tensor) -> None:
    """Raise :class:`ModelError` unless queries and keys have S/cp tokens."""
    if q.shape[TOKEN_DIM] != cut.share or k.shape[TOKEN_DIM] != cut.share:
        raise ModelError(
            "MW-CP-004",
            f"{name} is called with queries {tuple(q.shape)} and keys {tuple(k.shape)} instead of"
            f" {cut.share} tokens "
            f"each: with parallel.cp = {cut.group.size} the embedding of token ids must be in the"
            " sharding_plan (kind "
            f'"{VOCAB}"), so that each rank has its own tokens of the {cut.length}, and the layer'
            " must take lengths "
            f"from the outputs of its linears (q.shape[1]), not from its input",
        )


def _take_heads(
    name: str,
    cut: TokenCut,
    head_cut: HeadCut,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Exchange tokens of q, k, v for heads: (B, heads, S/cp, d) -> (B, heads/cp, S, d).
    Collective over cp; blocks.
    """
    q, k, v, *others = args
    _check_tokens(name, cut, q, k)
    cp = cut.group.size
    if q.shape[1] % cp or k.shape[1] % cp:
        raise ModelError(
            "MW-CP-012",
            f'{name}: parallel.cp_exchange = "heads" needs heads that parallel.cp = {cp} divides,'
            f" and each tensor-parallel rank has {q.shape[1]} query heads and {k.shape[1]}"
            ' key-value heads: use a cp x tp that divides both, or parallel.cp_exchange = "keys"',
        )
    head_cut.begin(q.shape[1] // cp)
    return (*tokens_to_heads((q, k, v), cut), *others), kwargs


def _give_heads(
    name: str, cut: TokenCut, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Tensor:
    """Exchange the output's heads for tokens: (B, H/cp, S, d) -> (B, H, S/cp, d).
    Collective over cp; blocks.
    """
    shape = tuple(output.shape) if isinstance(output, Tensor) else ()
    if len(shape) != 4 or shape[TOKEN_DIM] != cut.length:
        raise ModelError(
            "MW-CP-013",
            f"{name} returns {shape or type(output).__name__}, not (samples, heads, {cut.length}"
            " tokens, head_dim) as "
            f'parallel.cp_exchange = "heads" needs: use parallel.cp_exchange = "keys"',
        )
    mixed: Tensor = heads_to_tokens(output, cut)
    return mixed
