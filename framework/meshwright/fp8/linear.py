"""Linear with forward and input-gradient products in float8,
and the weight gradient in the training dtype.

    forward    y  = q(x) q(W)^T        contracted over I: scales per row of x (token) and per row of W
    I          dx = q(dy) q(W^T)^T     contracted over O: scales per row of dy (token) and per column of W
    W          dW = dy^T value(q(x))   in the training dtype; x is saved as codes and exponents

Where tp cuts the contracted dim (I of a row layer, O of a column layer), an all-reduce over tp
agrees on the scales.

Source: the rowwise recipe of torchao with its weight gradient in high precision, with power-of-two
scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.fp8.products import has_modes, product
from meshwright.fp8.quantise import Float8Tensor, dequantise, quantise
from meshwright.mesh.comm import Group

Defer = Callable[[Tensor, Callable[[], Tensor]], Tensor | None]
"""(weight, function that computes its gradient) -> gradient, or None to add it later;
see tensor_parallel/column.py.
"""


def compute_now(parameter: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    """Compute the weight gradient in backward, without deferring it."""
    return gradient()


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cut_in: Group | None = None,
    cut_out: Group | None = None,
    defer: Defer = compute_now,
) -> Tensor:
    """Return ``F.linear(x, weight, bias)`` in float8: x (..., I), weight (O, I), bias (O,)
    or None -> (..., O), local.

    The caller sums partial outputs over ``cut_in``, and partial input gradients over ``cut_out``.

    Args:
        cut_in: tp group that cuts I: forward blocks for one all-reduce of exponents. None: I is
            whole.
        cut_out: tp group that cuts O: backward blocks for one all-reduce of exponents. None: O is
            whole.
        defer: called in backward for each weight gradient, as in ``tensor_parallel/column.py``.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(
            fp8_linear, (x, weight), x, weight, bias, cut_in, cut_out, defer=defer
        )
    if x.dtype != weight.dtype:
        return F.linear(x, weight, bias)  # raises torch's own error
    y: Tensor = _Fp8Linear.apply(x, weight, cut_in, cut_out, defer)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


fp8_linear.defers_gradients = True  # type: ignore[attr-defined]


class _Fp8Linear(torch.autograd.Function):
    """Linear in float8: x (..., I), weight (O, I) -> (..., O), all local."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        cut_in: Group | None,
        cut_out: Group | None,
        defer: Defer,
    ) -> Tensor:
        kept, quantised = quantise([x, weight], cut_in)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(*kept)
        ctx.weight, ctx.cut_out = weight, cut_out
        # a weight that is no leaf needs its gradient in I
        ctx.defer = defer if weight.is_leaf else compute_now
        y = product(kept, quantised, x.dtype)
        return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]  # no view: may change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        gx = gw = None
        if needs_x:
            quantised_gy, quantised = quantise([gy, ctx.weight.t()], ctx.cut_out)
            gx = product(quantised_gy, quantised, gy.dtype)
        if needs_weight:
            kept = Float8Tensor(*ctx.saved_tensors)
            gw = ctx.defer(ctx.weight, lambda: weight_gradient(gy, kept))
        return gx, gw, None, None, None


def weight_gradient(gy: Tensor, x: Float8Tensor) -> Tensor:
    """Return dW (O, I) in the training dtype from gy (..., O) and the saved x (..., I)."""
    values = dequantise(x, gy.dtype)
    return gy.reshape(-1, gy.shape[-1]).t().mm(values.reshape(-1, values.shape[-1]))


class Fp8Linear(nn.Linear):
    """nn.Linear in float8: x (..., I) -> (..., O).
    Conversion sets ``__class__`` of a plain linear.
    """

    def forward(self, input: Tensor) -> Tensor:
        if has_modes():  # dynamo does not pass fp8_linear to function modes, which split backward
            y: Tensor = _outside_graphs(input, self.weight, self.bias)
            return y
        return fp8_linear(input, self.weight, self.bias)


_outside_graphs = torch.compiler.disable(fp8_linear)  # type: ignore[no-untyped-call]
