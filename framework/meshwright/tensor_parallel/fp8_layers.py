"""Column and row linears in float8: scales are the same on all tp ranks
where tp cuts the contracted dim.

    layer    forward contracts    backward contracts    exponents all-reduced over tp
    column   I, whole             O, cut                in backward: (B, S) of dy and I of W
    row      I, cut               O, whole              in forward: (B, S) of x and O of W

Under sequence parallelism a column quantises its part of x and all-gathers codes and exponents:
half the bytes of bfloat16, in forward and again in backward. Only the codes of this rank's part are
kept between the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.fp8.linear import Defer, compute_now, fp8_linear, weight_gradient
from meshwright.fp8.products import product
from meshwright.fp8.quantise import Float8Tensor, quantise
from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.tensor_parallel.column import SequenceGathering, reduce_gradient
from meshwright.tensor_parallel.regions import outside_graphs


@outside_graphs
def fp8_column(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence: bool,
    gathered: bool = False,
) -> Tensor:
    """Return this rank's output features: x (B, S, I), or (B, S/tp, I) with ``sequence`` -> (B, S,
    O/tp).

    Communication as in :func:`meshwright.tensor_parallel.column.column_linear`, with all-gathers of
    (I + 1)/(2 I) of the bytes, and an all-reduce of exponents over tp in backward.

    Args:
        weight: (O/tp, I), this rank's rows. ``bias``: (O/tp,).
        gathered: an enclosing module communicates x and its gradient.
    """
    if gathered:
        return fp8_linear(x, weight, bias, cut_out=group)
    y = _column(x, weight, group, sequence)
    return y if bias is None else y + bias


@outside_graphs
def fp8_row(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """Return partial sums of the output: x (B, S, I/tp), weight (O, I/tp) -> (B, S, O).
    Reduces exponents over tp.
    """
    return fp8_linear(x, weight, cut_in=group)


def _column(
    x: Tensor, weight: Tensor, group: Group, sequence: bool, defer: Defer = compute_now
) -> Tensor:
    """Return :func:`fp8_column` without bias. Backward calls ``defer`` for the weight gradient."""
    if has_torch_function((x, weight)):
        return handle_torch_function(_column, (x, weight), x, weight, group, sequence, defer=defer)
    if x.dtype != weight.dtype:
        return torch.nn.functional.linear(x, weight)  # torch's own error
    return _Fp8Column.apply(x, weight, group, sequence, defer)  # type: ignore[no-untyped-call,no-any-return]


_column.defers_gradients = True  # type: ignore[attr-defined]


class _QuantisedGathering:
    """All-gather of a quantised sequence over tp, posted when made: (B, S/tp, I) -> (B, S, I).
    Two messages.
    """

    def __init__(self, part: Float8Tensor, group: Group) -> None:
        self._dtype = part.codes.dtype
        self._codes = SequenceGathering(part.codes.view(torch.uint8), group)
        self._exponents = SequenceGathering(part.exponents, group)

    def wait(self) -> Float8Tensor:
        """Return the full sequence. Blocks."""
        return Float8Tensor(self._codes.wait().view(self._dtype), self._exponents.wait())


class _Fp8Column(torch.autograd.Function):
    """Column linear: x (B, S, I) or (B, S/tp, I), weight (O/tp, I) -> (B, S, O/tp), all local."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: Group, sequence: bool, defer: Defer
    ) -> Tensor:
        (part,) = quantise([x], None)
        gathering = _QuantisedGathering(part, group) if sequence else None
        (quantised,) = quantise([weight], None)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(*part)
        ctx.weight, ctx.group, ctx.sequence, ctx.defer = weight, group, sequence, defer
        y = product(part if gathering is None else gathering.wait(), quantised, x.dtype)
        return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        group, weight = ctx.group, ctx.weight
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        part = Float8Tensor(*ctx.saved_tensors) if needs_weight else None
        gathering = _QuantisedGathering(part, group) if part is not None and ctx.sequence else None
        gx, gw, handle = None, None, CollectiveHandle()
        if needs_x:
            quantised_gy, quantised = quantise([gy, weight.t()], group)
            gx = product(quantised_gy, quantised, gy.dtype)
        whole = part if gathering is None else gathering.wait()
        if gx is not None:
            gx, handle = reduce_gradient(gx, group, ctx.sequence)
        if whole is not None:
            gw = ctx.defer(weight, lambda: weight_gradient(gy, whole))
        handle.wait()
        return gx, gw, None, None, None
