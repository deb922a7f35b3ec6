"""Activation checkpointing (recompute): of whole layers, of operations, or of the submodules that a model names.

    none        keep all activations
    pointwise   activation functions, element-wise operations and norms (``pointwise.py``)
    selective   the submodules that the model names in ``selective_recompute`` (attention's core: cheap to compute,
                expensive to keep; Korthikanti et al. 2022, section 5)
    full        keep the input of each layer only

The second forward must repeat the first one. Dropout here is a function of the sample, not of the random state. So
two things must be restored: the samples of the micro-batch, and the split backward's mode that defers weight gradients.
A ``Context`` captures both before the first forward, and is entered around the second one.

NOTE [hooks on arguments]: the arguments of both forwards are tensors of the one graph that backward walks. A hook that
a layer registers on its input would therefore be registered, and run, twice. The second forward gets aliases: their
hooks are in the graph of the second forward, which nobody walks. Tensors made inside need no alias: they are in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright.model.buffers import SpareCounters
from meshwright.pipeline.pointwise import OuterHooks, no_hooks, recompute_pointwise
from meshwright.pipeline.split_backward import SplitBackward
from meshwright.seeding import Draw, SeededDropout, dropouts_of

Context = Callable[[], AbstractContextManager[object]]
"""Function called when a forward begins; the context that it returns is entered around the second forward."""
POINTWISE = "(pointwise)"
"""Suffix of a layer's name that stands for its pointwise operations. No submodule has this name."""


def recomputed(function: Callable[..., Any], context: Context, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, and keep only its arguments for backward when gradients are enabled.

    A function whose method ``recomputes`` returns True for the arguments does its own recompute, and is just called.
    """
    recomputes: Callable[..., bool] = getattr(function, "recomputes", lambda *args, **kwargs: False)
    if not torch.is_grad_enabled() or recomputes(*args, **kwargs):
        return function(*args, **kwargs)

    is_first = True

    def on_fresh_containers(*args: Any, **kwargs: Any) -> Any:
        """Call the function on copies of dicts and lists, and on aliases of their tensors in the second forward.

        A layer may write into its input dict, and the second forward needs the same input as the first.
        """
        nonlocal is_first
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs)) if is_first else aliases((args, kwargs))
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
    """Return a copy of a tree whose tensors with a gradient are aliases; see NOTE [hooks on arguments].

    Tensors that are one tensor in the graph stay one, so that a layer may differentiate by one of them in its forward.
    Parameters stay themselves: they are known by their class, and have no hooks (MW-MODEL-016).
    """
    made: dict[tuple[Node, int], Tensor] = {}

    def alias(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _with_fields(alias, leaf) if is_dataclass(leaf) and not isinstance(leaf, type) else leaf
        if isinstance(leaf, nn.Parameter) or not leaf.requires_grad:
            return leaf
        edge = get_gradient_edge(leaf)
        place = edge.node, edge.output_nr
        if place not in made:
            made[place] = leaf.detach().requires_grad_() if leaf.is_leaf else leaf.view_as(leaf)
        return made[place]

    return tree_map(alias, value)


def _with_fields(function: Callable[[Any], Any], record: Any) -> Any:
    """Return a copy of a dataclass's object with ``function`` applied to its fields."""
    copied = copy.copy(record)
    for each in fields(record):
        object.__setattr__(copied, each.name, tree_map(function, getattr(record, each.name)))
    return copied


class RepeatedContext(AbstractContextManager[None]):
    """Context that can be entered several times: a layer that differentiates in its forward has several second ones."""

    def __init__(self, enter: Callable[[], AbstractContextManager[object]]) -> None:
        self._enter = enter
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        self._entered.append(self._enter())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _with_calls(dropouts: Sequence[SeededDropout], context: Context) -> AbstractContextManager[object]:
    """Return ``context()``, extended: while it is entered, the dropouts have the call numbers that they have now."""
    return RepeatedContext(partial(_at_calls, dropouts, [dropout.num_calls for dropout in dropouts], context()))


@contextmanager
def _at_calls(
    dropouts: Sequence[SeededDropout], numbers: Sequence[int], context: AbstractContextManager[object]
) -> Iterator[None]:
    now = [dropout.num_calls for dropout in dropouts]
    for dropout, number in zip(dropouts, numbers, strict=True):
        dropout.num_calls = number
    try:
        with context:
            yield
    finally:
        for dropout, number in zip(dropouts, now, strict=True):
            dropout.num_calls = number


def parts_of(layer_name: str, layer: nn.Module, patterns: Collection[str]) -> list[tuple[str, nn.Module]]:
    """Return the submodules, and the layer itself, whose full name matches a pattern.

    A layer is also listed under the name of its pointwise operations, if ``patterns`` contains it.
    """
    operations = f"{layer_name}.{POINTWISE}" if layer_name else POINTWISE
    found = [(operations, layer)] if operations in patterns else []
    return found + [
        (name, module)
        for name, module in layer.named_modules(prefix=layer_name)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def recompute_parts(
    layer_name: str, layer: nn.Module, patterns: Collection[str], context: Context, hooks: OuterHooks = no_hooks
) -> list[str]:
    """Wrap each submodule whose full name matches a pattern in activation checkpointing, in place; return the names.

    ``hooks``: function, called when a layer's forward begins, that returns the hooks for tensors that stay saved.
    """
    found = parts_of(layer_name, layer, patterns)
    dropouts = dropouts_of(layer)  # a submodule may call a dropout outside itself
    for name, module in found:
        if name.endswith(POINTWISE):
            module.forward = partial(recompute_pointwise, hooks, module.forward)
        else:
            module.forward = partial(recomputed, module.forward, partial(_with_calls, dropouts, context))
    return [name for name, _ in found]


@dataclass(frozen=True)
class RecomputeContext:
    """State of a forward that its recompute restores: the samples of its dropouts, and the split-backward mode.

    ``spare``: copies of the buffers that count micro-batches, which take the counts of the second forward.
    """

    draw: Draw
    split: SplitBackward | None
    spare: SpareCounters

    def __call__(self) -> AbstractContextManager[object]:
        """Return the context for the second forward of the present micro-batch; called when the first begins."""
        return RepeatedContext(partial(self._restored, replace(self.draw, is_recompute=True)))

    @contextmanager
    def _restored(self, then: Draw) -> Iterator[None]:
        draw = self.draw
        now = replace(draw)
        draw.__dict__.update(vars(then))
        try:
            with self.split or nullcontext(), self.spare.installed():
                yield
        finally:
            draw.__dict__.update(vars(now))


def recompute_layers(
    layers: nn.Sequential, names: Collection[str], context: Context, hooks: OuterHooks | None = None
) -> frozenset[str]:
    """Wrap parts of layers in activation checkpointing, in place; return the layers to recompute as a whole."""
    whole = frozenset(layers._modules) & frozenset(names)
    for name, layer in layers.named_children():
        if name not in whole:
            recompute_parts(name, layer, names, context, hooks or no_hooks)
    return whole
