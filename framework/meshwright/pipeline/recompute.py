"""Activation checkpointing (recompute): of whole layers, of operations,
or of the submodules that a model names.

    none        keep all activations
    pointwise   activation functions, element-wise operations and norms (``pointwise.py``)
    selective   the submodules that the model names in ``selective_recompute`` (attention's core: cheap to compute,
                expensive to keep; Korthikanti et al. 2022, section 5)
    full        keep the input of each layer only

The second forward must repeat the first one. Dropout here is a function of the sample, not of the
random state. So two things must be restored: the samples of the micro-batch, and the split
backward's mode that defers weight gradients. A ``Context`` captures both before the first forward,
and is entered around the second one.

NOTE [hooks on arguments]: the arguments of both forwards are tensors of the one graph that backward
walks. A hook that a layer registers on its input would therefore be registered, and run, twice. The
second forward gets aliases: their hooks are in the graph of the second forward, which nobody walks.
Tensors made inside need no alias: they are in it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright.current import CurrentMicrobatch
from meshwright.model.buffers import SpareCounters
from meshwright.pipeline.pointwise import OuterHooks, no_hooks, recompute_pointwise
from meshwright.pipeline.split_backward import SplitBackward
from meshwright.placement.patterns import fits
from meshwright.placement.rewrite import ModuleSite, PlacementRule, rewrite
from meshwright.seeding import SeededDropout, dropouts_of

Context = Callable[[], AbstractContextManager[object]]
"""Function called when a forward begins;
the context that it returns is entered around the second forward.
"""
POINTWISE = "(pointwise)"
"""Suffix of a layer's name that stands for its pointwise operations. No submodule has this name."""


def recomputed(function: Callable[..., Any], context: Context, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, and keep only its arguments for backward when gradients are enabled.

    A function whose method ``recomputes`` returns True for the arguments does its own recompute,
    and is just called.
    """
    recomputes: Callable[..., bool] = getattr(function, "recomputes", lambda *args, **kwargs: False)
    if not torch.is_grad_enabled() or recomputes(*args, **kwargs):
        return function(*args, **kwargs)

    is_first = True

    def on_fresh_containers(*args: Any, **kwargs: Any) -> Any:
        """Call the function on copies of dicts and lists,
        and on aliases of their tensors in the second forward.

        A layer may write into its input dict, and the second forward needs the same input as the
        first.
        """
        nonlocal is_first
        args, kwargs = (
            tree_map(lambda leaf: leaf, (args, kwargs)) if is_first else aliases((args, kwargs))
        )
        is_first = False
        return function(*args, **kwargs)

    return checkpoint(
        on_fresh_containers,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # no layer draws from torch's generators
        context_fn=lambda: (nullcontext(), context()),
        **kwargs,
    )


def aliases(value: Any) -> Any:
    """Return a copy of a tree whose tensors with a gradient are aliases;
    see NOTE [hooks on arguments].

    Tensors that are one tensor in the graph stay one, so that a layer may differentiate by one of
    them in its forward. Parameters stay themselves: they are known by their class, and have no
    hooks (MW-MODEL-016).
    """
    alias_of: dict[tuple[Node, int], Tensor] = {}

    def alias(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            is_record = is_dataclass(leaf) and not isinstance(leaf, type)
            return _with_fields(alias, leaf) if is_record else leaf
        if isinstance(leaf, nn.Parameter) or not leaf.requires_grad:
            return leaf
        edge = get_gradient_edge(leaf)
        place = edge.node, edge.output_nr
        if place not in alias_of:
            alias_of[place] = leaf.detach().requires_grad_() if leaf.is_leaf else leaf.view_as(leaf)
        return alias_of[place]

    return tree_map(alias, value)


def _with_fields(function: Callable[[Any], Any], record: Any) -> Any:
    """Return a copy of a dataclass's object with ``function`` applied to its fields."""
    copied = copy.copy(record)
    for attribute in fields(record):
        object.__setattr__(
            copied, attribute.name, tree_map(function, getattr(record, attribute.name))
        )
    return copied


class RepeatedContext(AbstractContextManager[None]):
    """Context that can be entered several times:
    a layer that differentiates in its forward has several second ones.
    """

    def __init__(self, enter: Callable[[], AbstractContextManager[object]]) -> None:
        self._enter = enter
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        self._entered.append(self._enter())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _with_calls(
    dropouts: Sequence[SeededDropout], context: Context
) -> AbstractContextManager[object]:
    """Return ``context()``, extended: while it is entered,
    the dropouts have the call numbers that they have now.
    """
    return RepeatedContext(
        partial(_at_calls, dropouts, [dropout.num_calls for dropout in dropouts], context())
    )


@contextmanager
def _at_calls(
    dropouts: Sequence[SeededDropout],
    numbers: Sequence[int],
    context: AbstractContextManager[object],
) -> Iterator[None]:
    now = [dropout.num_calls for dropout in dropouts]
    for dropout, number in zip(dropouts, numbers, strict=True):
        dropout.num_calls = number
    try:
        with context, ExitStack() as stack:
            for dropout in dropouts:
                stack.enter_context(dropout.around_recompute())
            yield
    finally:
        for dropout, number in zip(dropouts, now, strict=True):
            dropout.num_calls = number


def parts_of(
    layer_name: str, layer: nn.Module, patterns: Collection[str]
) -> list[tuple[str, nn.Module]]:
    """Return the submodules, and the layer itself, whose full name matches a pattern.

    A layer is also listed under the name of its pointwise operations, if ``patterns`` contains it.
    """
    operations = f"{layer_name}.{POINTWISE}"
    parts = [(operations, layer)] if operations in patterns else []
    return parts + [
        (name, module)
        for name, module in layer.named_modules(prefix=layer_name)
        if fits(name, *patterns)
    ]


def recompute_parts(
    layer_name: str,
    layer: nn.Module,
    patterns: Collection[str],
    context: Context,
    hooks: OuterHooks = no_hooks,
) -> None:
    """Wrap each submodule of a layer, and the layer itself, whose full name matches a pattern in
    activation checkpointing, in place; see :func:`recompute_layers`.
    """
    alone = nn.Sequential(OrderedDict({layer_name: layer}))
    rewrite(alone, _rules(alone, patterns, context, hooks))


def _rules(
    layers: nn.Sequential, patterns: Collection[str], context: Context, hooks: OuterHooks
) -> list[PlacementRule]:
    """Return the rules of activation checkpointing, the pointwise operations of a layer first."""
    # a submodule may call a dropout of its layer that is outside of itself
    dropouts = {name: dropouts_of(layer) for name, layer in layers.named_children()}
    pointwise = partial(_repeat_pointwise, hooks)
    whole = [each.removesuffix(f".{POINTWISE}") for each in patterns if each.endswith(POINTWISE)]
    rules = [PlacementRule("recompute", each, "pointwise", pointwise) for each in whole]
    repeat = partial(_repeat, dropouts, context)
    parts = [each for each in patterns if not each.endswith(POINTWISE)]
    return rules + [PlacementRule("recompute", each, "forward", repeat) for each in parts]


def _repeat_pointwise(hooks: OuterHooks, site: ModuleSite) -> None:
    """Make backward compute the pointwise operations of a layer again."""
    module = site.module
    module.forward = partial(recompute_pointwise, hooks, module.forward)


def _repeat(
    dropouts: Mapping[str, Sequence[SeededDropout]], context: Context, site: ModuleSite
) -> None:
    """Make backward run a module's forward again. Several layers may have the module."""
    module = site.module
    layer_names = dict.fromkeys(name.partition(".")[0] for name in site.names)
    around = [dropout for name in layer_names for dropout in dropouts[name]]
    module.forward = partial(recomputed, module.forward, partial(_with_calls, around, context))


@dataclass(frozen=True)
class RecomputeContext:
    """State of a forward that its recompute restores: the samples of its dropouts,
    and the split-backward mode.

    ``spare``: copies of the buffers that count micro-batches, which take the counts of the second
        forward.
    """

    current: CurrentMicrobatch
    split: SplitBackward | None
    spare: SpareCounters

    def __call__(self) -> AbstractContextManager[object]:
        """Return the context for the second forward of the present micro-batch;
        called when the first begins.
        """
        return RepeatedContext(partial(self._restored, replace(self.current, is_recompute=True)))

    @contextmanager
    def _restored(self, then: CurrentMicrobatch) -> Iterator[None]:
        current = self.current
        now = replace(current)
        current.__dict__.update(vars(then))
        try:
            with self.split or nullcontext(), self.spare.installed():
                yield
        finally:
            current.__dict__.update(vars(now))


def recompute_layers(
    layers: nn.Sequential, names: Collection[str], context: Context, hooks: OuterHooks | None = None
) -> frozenset[str]:
    """Wrap parts of layers in activation checkpointing, in place;
    return the layers to recompute as a whole.
    """
    whole = frozenset(layers._modules) & frozenset(names)
    parts = [name for name in names if name.partition(".")[0] not in whole]
    rewrite(layers, _rules(layers, parts, context, hooks or no_hooks))
    return whole
