"""Column-parallel linear whose backward overlaps its communication with its two GEMMs.

    forward    y = x W^T + b                             under sequence parallelism after an all-gather of x
    backward                 on the wire                 meanwhile
                             all-gather of x             dx = gy W      (sequence parallelism: only x's part was saved)
                             all-reduce of dx            dW = gy^T x    (sequence parallelism: reduce-scatter)

Saving this rank's part of x, (B, S/tp, I), and gathering it again is what makes sequence
parallelism save memory here (Korthikanti et al. 2022, section 4.2.2). On CUDA a collective runs on
a stream of its own and is posted before the product; on CPU gloo's threads run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.parameters import WeightProduct, add_gradient, autocast_dtype
from meshwright.tensor_parallel.regions import join_sequence, outside_graphs, split_sequence

Defer = Callable[[Tensor, Callable[[], Tensor]], Tensor | None]
"""(parameter, function that computes its gradient) -> the gradient,
or None if it is added later (split backward).
"""


@outside_graphs
def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence: bool,
    defer: Defer = add_gradient,
) -> Tensor:
    """Return this rank's output features of a linear: x (B, S, I), the same on all ranks -> (B, S,
    O/tp).

    With ``sequence`` x is this rank's (B, S/tp, I), which forward all-gathers over tp and blocks: M
    (tp-1)/tp bytes on the wire per rank, M = bytes of (B, S, I). Backward all-reduces the gradient
    of x (2 M (tp-1)/tp bytes), or gathers x again and reduce-scatters its gradient (M (tp-1)/tp
    each); it blocks after the GEMMs.

    Args:
        weight: (O/tp, I), this rank's rows. ``bias``: (O/tp,).
        defer: called in backward for each weight gradient. pipeline/split_backward.py passes its
            own to functions with the attribute ``defers_gradients``.
    """
    if group.size == 1:
        return F.linear(x, weight, bias)
    if has_torch_function((x, weight)):
        arguments = x, weight, bias, group, sequence
        return handle_torch_function(column_linear, (x, weight), *arguments, defer=defer)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        # the gradient of a cast weight is that of no parameter: it cannot be deferred
        defer = add_gradient
    return _ColumnLinear.apply(x, weight, bias, group, sequence, defer)  # type: ignore[no-untyped-call,no-any-return]


column_linear.defers_gradients = True  # type: ignore[attr-defined]


class _ColumnLinear(torch.autograd.Function):
    """Column linear: x (B, S, I) or (B, S/tp, I), weight (O/tp, I), bias (O/tp,) or None -> (B, S,
    O/tp), all local.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sequence: bool,
        defer: Defer,
    ) -> Tensor:
        if weight.requires_grad:  # with a frozen weight backward needs gy only
            ctx.save_for_backward(x)
        # the Parameter itself, because the sums of its gradient are looked up by identity
        ctx.weight = weight
        ctx.bias = bias
        ctx.group = group
        ctx.sequence = sequence
        ctx.defer = defer
        whole = SequenceGathering(x, group).wait() if sequence else x
        y = F.linear(whole, weight, bias)
        # F.linear may return a view, which the caller could not change in place
        return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        group, weight, bias = ctx.group, ctx.weight, ctx.bias
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x = ctx.saved_tensors[0] if needs_weight else gy
        # posted first, awaited after the product that does not need it
        gathering = SequenceGathering(x, group) if ctx.sequence and needs_weight else None
        rows = gy.reshape(-1, gy.shape[-1])
        gx, reducing = None, CollectiveHandle()
        if needs_x:
            gx = rows.mm(weight).view(*gy.shape[:-1], weight.shape[-1])
        whole = gathering.wait() if gathering is not None else x
        if gx is not None:
            # Without this sum the layers before would get, on each tp rank, the gradient through
            # its own output features only. It runs during the weight's product.
            gx, reducing = reduce_gradient(gx, group, ctx.sequence)
        gw = gb = None
        if needs_weight:
            # detached, because a deferred product keeps it
            gw = ctx.defer(weight, WeightProduct(rows, whole.detach()))
        if needs_bias:
            gb = ctx.defer(bias, lambda: rows.sum(0))
        reducing.wait()
        return gx, gw, gb, None, None, None


class SequenceGathering:
    """All-gather of the sequence over tp, posted when made: (B, S/tp, I) -> (B, S, I)."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self._parts = x.new_empty((group.size, *x.shape))
        if x.is_meta:
            group.begin_collective("all_gather", x, group.size)
            self._handle = CollectiveHandle()
        else:
            self._handle = group.all_gather(self._parts.flatten(0, 1), x.contiguous())

    def wait(self) -> Tensor:
        """Return the full sequence. Blocks."""
        self._handle.wait()
        return join_sequence(self._parts)


def reduce_gradient(gx: Tensor, group: Group, sequence: bool) -> tuple[Tensor, CollectiveHandle]:
    """Post the sum of partial gradients (B, S, I) over tp; with ``sequence`` only this rank's (B,
    S/tp, I) of it.
    """
    operation = "reduce_scatter" if sequence else "all_reduce"
    parts = split_sequence(gx, group.size) if sequence else gx
    result = torch.empty_like(parts[0]) if sequence else gx
    if gx.is_meta:
        group.begin_collective(operation, gx)
        return result, CollectiveHandle()
    return result, group.reduce_scatter(result, parts) if sequence else group.all_reduce(result)
