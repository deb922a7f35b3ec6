"""Activations that are not kept but computed again in backward: whole layers, or the parts that a model names.

    none        keep everything
    selective   the submodules that the model names in ``selective_recompute`` (attention's core: cheap to compute,
                dear to keep; Korthikanti et al. 2022, section 5)
    full        keep the input of each layer only

The second forward must be the first one again. Dropout here is a function of the sample and not of the moment, so what
has to be brought back is which samples were going through (and the split backward's mode, which notes weight
gradients): ``context`` says it for a forward that is about to run, and is entered again around the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright.config.schema import Pipeline
from meshwright.errors import ModelError
from meshwright.model.build import PlainModel
from meshwright.seeding import SeededDropout, dropouts_of

Context = Callable[[], AbstractContextManager[object]]
"""Called as a forward begins; what it returns is entered around the second forward."""


def recomputed(function: Callable[..., Any], context: Context, *args: Any, **kwargs: Any) -> Any:
    """``function(...)``, of which only the arguments are kept when gradients are wanted."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    def on_fresh_containers(*args: Any, **kwargs: Any) -> Any:
        """A layer may write into the dict that it was handed; the second forward must be handed the first one's."""
        args, kwargs = tree_map(_same, (args, kwargs))
        return function(*args, **kwargs)

    return checkpoint(
        on_fresh_containers,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing here draws from torch's generators
        context_fn=lambda: (nullcontext(), context()),
        **kwargs,
    )


def _with_calls(dropouts: Sequence[SeededDropout], context: Context) -> AbstractContextManager[object]:
    """The context, and the dropouts at the call numbers that they have now."""
    return _at_calls(dropouts, [dropout.num_calls for dropout in dropouts], context())


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


def _same(leaf: Any) -> Any:
    return leaf


def parts_of(layer_name: str, layer: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The submodules, and the layer itself, whose full name fits a pattern."""
    return [
        (name, module)
        for name, module in layer.named_modules(prefix=layer_name)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def recompute_parts(layer_name: str, layer: nn.Module, patterns: Sequence[str], context: Context) -> list[str]:
    """Have each submodule whose full name fits a pattern recomputed, in place; the names found."""
    found = parts_of(layer_name, layer, patterns)
    dropouts = dropouts_of(layer)  # a part may call one that lies beside it
    for _, module in found:
        module.forward = partial(recomputed, module.forward, partial(_with_calls, dropouts, context))
    return [name for name, _ in found]


def check_recompute(pipeline: Pipeline, model: PlainModel, builder: str) -> None:
    """Raise :class:`ModelError` where ``pipeline.recompute`` (activation checkpointing) would recompute nothing."""
    if pipeline.recompute == "none":
        return
    names = list(model.layers._modules)
    if not pipeline.recompute_layers:
        raise ModelError(
            f'pipeline.recompute = "{pipeline.recompute}" with pipeline.recompute_layers = []: name layers, such as '
            f'["block*"], or set pipeline.recompute = "none"'
        )
    for pattern in pipeline.recompute_layers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"pipeline.recompute_layers holds {pattern!r}, which fits no layer; the layers are {', '.join(names)}"
            )
    if pipeline.recompute == "full":
        return
    if not model.selective_recompute:
        raise ModelError(
            f'pipeline.recompute = "selective", but {builder} does not say what is cheap to compute and '
            f"dear to keep: set model.selective_recompute to patterns of submodule names, such as "
            f'["block*.attention.core"], or choose "full"'
        )
    parts = [name for name, _ in model.layers.named_modules()]
    for pattern in model.selective_recompute:
        if not any(fnmatchcase(name, pattern) for name in parts):
            raise ModelError(f"{builder}: selective_recompute holds {pattern!r}, which fits no submodule")
    if not recomputed_names(pipeline, model):
        raise ModelError(
            f"pipeline.recompute_layers = {pipeline.recompute_layers} fits no layer that holds a part of "
            f'{model.selective_recompute}, what the model names for "selective": nothing would be recomputed'
        )


def recomputed_names(pipeline: Pipeline, model: PlainModel) -> list[str]:
    """Return the names of the layers, or parts of layers, that backward computes again."""
    if pipeline.recompute == "none":
        return []
    chosen = [name for name in model.layers._modules if any(fnmatchcase(name, p) for p in pipeline.recompute_layers)]
    if pipeline.recompute == "full":
        return chosen
    parts = [name for name, _ in model.layers.named_modules() if name.partition(".")[0] in chosen]
    return [part for part in parts if any(fnmatchcase(part, p) for p in model.selective_recompute)]
