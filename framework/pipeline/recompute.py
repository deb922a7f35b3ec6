"""Activation checkpointing (recompute): of whole layers, or of the submodules that a model names.

    none        keep all activations
    selective   the submodules that the model names in ``selective_recompute`` (attention's core: cheap to compute,
                expensive to keep; Korthikanti et al. 2022, section 5)
    full        keep the input of each layer only

The second forward must repeat the first one. Dropout here is a function of the sample and not of the random state. So
only two things must be restored: the samples of the micro-batch, and the split backward's mode that notes weight
gradients. ``context`` captures both before a forward, and is entered again around the second one.
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

from meshwright.config import Pipeline
from meshwright.errors import ModelError
from meshwright.model.build import PlainModel
from meshwright.seeding import SeededDropout, dropouts_of

Context = Callable[[], AbstractContextManager[object]]
"""Function called as a forward begins; the context that it returns is entered around the second forward."""


def recomputed(function: Callable[..., Any], context: Context, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, and keep only its arguments for backward when gradients are enabled."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    def on_fresh_containers(*args: Any, **kwargs: Any) -> Any:
        """Call the function on copies of dicts and lists.

        A layer may write into a dict that it gets, and the second forward needs the same input as the first.
        """
        args, kwargs = tree_map(_same, (args, kwargs))
        return function(*args, **kwargs)

    return checkpoint(
        on_fresh_containers,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # no layer draws from torch's generators
        context_fn=lambda: (nullcontext(), context()),
        **kwargs,
    )


def _with_calls(dropouts: Sequence[SeededDropout], context: Context) -> AbstractContextManager[object]:
    """Return the context extended by the dropouts' present call numbers, which it restores while entered."""
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
    """Return the submodules, and the layer itself, whose full name matches a pattern."""
    return [
        (name, module)
        for name, module in layer.named_modules(prefix=layer_name)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def recompute_parts(layer_name: str, layer: nn.Module, patterns: Sequence[str], context: Context) -> list[str]:
    """Wrap each submodule whose full name matches a pattern in activation checkpointing, in place; return the names."""
    found = parts_of(layer_name, layer, patterns)
    dropouts = dropouts_of(layer)  # a submodule may call a dropout outside itself
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
            "MW-PIPELINE-004",
            f'pipeline.recompute = "{pipeline.recompute}" with pipeline.recompute_layers = []: name layers, such as '
            f'["block*"], or set pipeline.recompute = "none"',
        )
    for pattern in pipeline.recompute_layers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                "MW-PIPELINE-005",
                f"pipeline.recompute_layers holds {pattern!r}, which fits no layer; the layers are {', '.join(names)}",
            )
    if pipeline.recompute == "full":
        return
    if not model.selective_recompute:
        raise ModelError(
            "MW-PIPELINE-006",
            f'pipeline.recompute = "selective", but {builder} does not say what is cheap to compute and '
            f"dear to keep: set model.selective_recompute to patterns of submodule names, such as "
            f'["block*.attention.core"], or choose "full"',
        )
    parts = [name for name, _ in model.layers.named_modules()]
    for pattern in model.selective_recompute:
        if not any(fnmatchcase(name, pattern) for name in parts):
            raise ModelError(
                "MW-PIPELINE-007", f"{builder}: selective_recompute holds {pattern!r}, which fits no submodule"
            )
    if not recomputed_names(pipeline, model):
        raise ModelError(
            "MW-PIPELINE-008",
            f"pipeline.recompute_layers = {pipeline.recompute_layers} fits no layer that holds a part of "
            f'{model.selective_recompute}, what the model names for "selective": nothing would be recomputed',
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
