"""Float8 linears of the plain run: the recipe of docs/precision.md,
written from its definition with a table of values.

Written without :mod:`meshwright.fp8`, so that a mistake in one of them does not hide in the other.
Shared is only the list of linears that compute in float8.

    step of a row    the smallest power of two s with amax <= 448 s; the row is divided by s
    rounding         to float32, then to the nearest of the 127 magnitudes of float8_e4m3fn; a tie to the even one
    y = q(x) q(W)^T,   dx = q(dy) q(W^T)^T,   dW = dy^T q(x), all products in the dtype of x
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MAGNITUDES = [mantissa * 2.0**-9 for mantissa in range(8)]
MAGNITUDES += [
    (1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)
]
MAGNITUDES = MAGNITUDES[:-1]
"""Magnitudes of float8_e4m3fn in order of their codes 0..126: subnormals, then normals up to 448;
code 127 is NaN.
"""


def rounded_rows(x: Tensor) -> Tensor:
    """Return x (..., K) with each row quantised to float8_e4m3fn and back, in the dtype of x."""
    amax = x.double().abs().amax(-1, keepdim=True).float().double()
    step = 2.0 ** torch.ceil(torch.log2(torch.where(amax > 0, amax, 1.0) / 448.0))
    scaled = (x.double() / step).float().double()
    return (nearest(scaled.abs()) * scaled.sign() * step).to(x.dtype)


def nearest(magnitude: Tensor) -> Tensor:
    """Return the nearest magnitude of float8_e4m3fn for values within [0, 448], float64,
    any shape.
    """
    table = torch.tensor(MAGNITUDES, dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    magnitude = magnitude.contiguous()
    below = torch.bucketize(magnitude, middles, right=False)
    above = torch.bucketize(magnitude, middles, right=True)
    return table[torch.where(below % 2 == 0, below, above)]  # they differ in a tie alone


class _PlainFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        values = rounded_rows(x)
        ctx.save_for_backward(values, weight)
        return values @ rounded_rows(weight).t()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, Tensor]:
        values, weight = ctx.saved_tensors
        gx = rounded_rows(gy) @ rounded_rows(weight.t()).t()
        return gx, gy.flatten(0, -2).t() @ values.flatten(0, -2)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    y: Tensor = _PlainFp8.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if module.bias is None else y + module.bias


def _no_weight(module: nn.Module) -> Tensor:
    raise AssertionError(
        "a layer reads the weight of a float8 linear without calling it: that is no float8 product"
    )


def use_fp8(layers: nn.Sequential, names: Iterable[str]) -> None:
    """Replace the forward of the named nn.Linears of the user's own module by one in float8.

    Their weights cannot be read outside of it, unless an adapter of the plain run does.
    """
    for name in names:
        module = layers.get_submodule(name)
        forward: Callable[[Tensor], Tensor] = partial(_forward, module)  # type: ignore[arg-type]
        module.forward = forward
        if type(module) is nn.Linear:
            module.__class__ = type("Linear", (nn.Linear,), {"weight": property(_no_weight)})
