"""Rows of a mixture of experts in the experts' order and back, without sums by index in backward.

torch's backward of ``index_select`` adds by index: on CUDA a slow kernel, whose order of sums varies if indices repeat.
Here both directions are selections, because the order is a permutation and its inverse is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ToExperts(torch.autograd.Function):
    """Dispatch of tokens x (N, D): rows (N k, D), with copy ``order[i]`` of the k copies of each token at place i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order.div(copies, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        g = g.index_select(0, inverse)
        return (g if ctx.copies == 1 else g.unflatten(0, (-1, ctx.copies)).sum(1)), None, None, None


class FromExperts(torch.autograd.Function):
    """Reordering of rows (R, D) from the experts' order to that of the tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return g.index_select(0, order), None, None
