"""Conversion of a model's linears to float8, chosen by name.

A model's nn.Linears are converted in place before it is sharded. Left in the training dtype are:

    linears whose name, or the name of an enclosing module, matches a pattern of ``train.fp8_keep``
    linears inside a module with a sharding rule (a function in the sharding plan)
    subclasses of nn.Linear, and direct calls of ``F.linear``

The default of ``train.fp8_keep``: the model's first element (the embedding), the last one with
linears (the head), and of the others with linears (the blocks) the first and the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

from torch import nn

from meshwright.config import Train, is_meant_for_gpu
from meshwright.errors import ModelError
from meshwright.fp8.linear import Fp8Linear
from meshwright.fp8.products import MULTIPLE
from meshwright.placement.patterns import check_patterns, enclosing, fits_around
from meshwright.placement.rewrite import ModuleSite, PlacementRule, rewrite


def default_keep(layers: nn.Sequential) -> list[str]:
    """Return the names of the elements that stay in the training dtype by default."""
    names = list(layers._modules)
    with_linears = [
        name for name, layer in layers._modules.items() if layer is not None and _linears(layer)
    ]
    blocks = [name for name in with_linears[:-1] if name != names[0]]
    return [names[0], *with_linears[-1:], *blocks[:1], *blocks[-1:]]


def names_in_fp8(
    layers: nn.Sequential, plan: Mapping[str, Any], keep: Sequence[str] | None
) -> list[str]:
    """Return the names of the nn.Linears that compute in float8.

    Args:
        plan: the model's sharding plan; modules with a function in it stay as they are.
        keep: patterns of ``train.fp8_keep``; None: the default.

    Raises:
        ModelError: a pattern matches no linear, or no linear is left.
    """
    linears = {
        name: module
        for name, module in layers.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear
    }
    around = dict.fromkeys(each for name in linears for each in (*enclosing(name), name))
    check_patterns("train.fp8_keep", keep or (), list(around), "linear")
    kept = list(default_keep(layers) if keep is None else keep)
    kept += [name for name, kind in plan.items() if callable(kind)]
    chosen = [name for name in linears if not fits_around(name, *kept)]
    shared = {id(module) for name, module in linears.items() if name not in chosen}
    chosen = [name for name in chosen if id(linears[name]) not in shared]
    if not chosen:
        reason = "by default the first and last block and the head"
        if keep is not None:
            reason = f"train.fp8_keep = {list(keep)}"
        raise ModelError(
            "MW-MODEL-038",
            f'train.linear = "fp8" has no effect on this model: all of its {len(linears)}'
            f" nn.Linears stay as they are ({reason}). Name fewer in train.fp8_keep, such as"
            ' ["head"], or leave train.linear out',
        )
    return chosen


def convert_linears(layers: nn.Sequential, plan: Mapping[str, Any], train: Train) -> None:
    """Change the class of nn.Linears to :class:`Fp8Linear` in place, with ``train.linear = "fp8"``;
    else do nothing.

    Raises:
        ModelError: see :func:`names_in_fp8`.
    """
    if train.linear == "fp8":
        chosen = frozenset(names_in_fp8(layers, plan, train.fp8_keep))
        rewrite(layers, [PlacementRule("fp8", "*", "float8", partial(_convert, chosen))])


def _convert(chosen: Set[str], site: ModuleSite) -> None:
    if site.name in chosen:
        site.module.__class__ = Fp8Linear


def check_sizes(layers: nn.Sequential, train: Train) -> None:
    """Check the sizes of local float8 weights (O, I) against the CUDA kernels,
    if the run is meant for GPUs.

    Raises:
        ModelError: a dim is not a multiple of 16; names the first five such linears.
    """
    if not is_meant_for_gpu(train.device, train.dtype):
        return
    found = []
    for name, module in layers.named_modules():
        if getattr(module, "is_fp8", False) or isinstance(module, Fp8Linear):
            shape = tuple(module.get_parameter("weight").shape)
            if any(size % MULTIPLE for size in shape):
                found.append(f"{name} {shape[0]} x {shape[1]}")
    if found:
        more = " ..." if len(found) > 5 else ""
        raise ModelError(
            "MW-MODEL-039",
            'train.linear = "fp8" on a GPU needs weights whose dims on a rank are multiples of'
            f" {MULTIPLE}, unlike {', '.join(found[:5])}{more}. Choose other sizes or another"
            ' parallel.tp, name these linears in train.fp8_keep, or set train.device = "cpu"',
        )


def _linears(layer: nn.Module) -> bool:
    return any(type(module) is nn.Linear for module in layer.modules())
