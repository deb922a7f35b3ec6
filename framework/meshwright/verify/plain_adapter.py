"""Low-rank adapters of the plain run: the formula of docs/adapters.md on the user's own module,
in plain torch.

    y = base(x) + (alpha / rank) (dropout(x) A^T) B^T        only A and B are trained
    y = m (x W^T + ..) / |W + (alpha / rank) B A| + bias     DoRA; m = |W| + lora_magnitude, |.| of each row

Written without :mod:`meshwright.adapters`, so that a mistake in one of them does not hide in the
other. Shared are the names of the parameters, by which both sides get their first values.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import Adapter
from meshwright.placement.patterns import fits


def use_adapters(layers: nn.Sequential, adapter: Adapter) -> None:
    """Add the configured adapters to the user's module, on meta,
    and freeze all other parameters.
    """
    if not adapter.rank:
        return
    for parameter in layers.parameters():
        parameter.requires_grad = False
    scale = (adapter.alpha or adapter.rank) / adapter.rank
    for name, module in list(layers.named_modules()):
        if isinstance(module, nn.Linear | nn.Embedding) and fits(name, *adapter.targets):
            rows, columns = module.weight.shape
            is_table = isinstance(module, nn.Embedding)
            outputs, inputs = (columns, rows) if is_table else (rows, columns)
            module.lora_a = (
                nn.Embedding(inputs, adapter.rank)
                if is_table
                else nn.Linear(inputs, adapter.rank, False)
            )
            module.lora_b = nn.Linear(adapter.rank, outputs, False)
            if not is_table:
                module.lora_dropout = nn.Dropout(adapter.dropout)
            if adapter.dora:
                module.lora_magnitude = nn.Parameter(module.weight.new_zeros(outputs))
            _adapt(module, scale)


def _adapt(module: nn.Module, scale: float) -> None:
    """Give the module the adapter, in its calls and in the weight that code outside
    of its calls reads.

    A layer may use the weight without calling the module (nn.MultiheadAttention does so with its
    out_proj). There the weight is W + s B A, or DoRA's, without dropout.
    """
    given: Any = module
    given.is_called = False

    def begin(module: Any, args: Any) -> None:
        module.is_called = True

    def end(module: Any, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        (x,) = args or kwargs.values()
        if isinstance(module, nn.Embedding):
            y = _table(scale, module, x, y)
        else:
            y = _linear(scale, module, x, y)
        module.is_called = False
        return y

    def weight(module: Any) -> Tensor:
        own: Tensor = module._parameters["weight"]
        return own if module.is_called else _whole_weight(scale, module, own)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, with_kwargs=True)
    plain = type(module)
    module.__class__ = type(plain.__name__, (plain,), {"weight": property(weight)})


def _whole_weight(scale: float, module: Any, own: Tensor) -> Tensor:
    a: Tensor = module.lora_a.weight
    b: Tensor = module.lora_b.weight
    if isinstance(module, nn.Embedding):
        return own + scale * a @ b.t()
    whole = own + scale * b @ a
    if not hasattr(module, "lora_magnitude"):
        return whole
    lengths: Tensor = (own.norm(dim=1) + module.lora_magnitude) / whole.detach().norm(dim=1)
    return whole * lengths[:, None]


def _linear(scale: float, module: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.linear(module.lora_dropout(x), module.lora_a.weight)
    low = F.linear(z, module.lora_b.weight) * scale
    if not hasattr(module, "lora_magnitude"):
        return y + low
    whole = (module.weight + scale * module.lora_b.weight @ module.lora_a.weight).detach()
    lengths = module.weight.norm(dim=1) + module.lora_magnitude
    base = y if module.bias is None else y - module.bias  # in float8 where the linear is
    y = (base + low) * (lengths / whole.norm(dim=1))
    return y if module.bias is None else y + module.bias


def _table(scale: float, module: Any, ids: Tensor, y: Tensor) -> Tensor:
    return y + F.linear(module.lora_a.weight[ids], module.lora_b.weight) * scale
