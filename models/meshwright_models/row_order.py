"""Reordering of a mixture's rows by expert and back, with backwards that need no ``index_add``.

torch's backward of ``index_select`` adds by index: a slow kernel on CUDA, whose order of sums
varies if indices repeat. Here forward and backward are both ``index_select``, by a permutation and
its inverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ToExperts(torch.autograd.Function):
    """Copies of tokens x (N, D) by expert: row i of (N k, D) is slot ``order[i]``,
    a copy of token order[i] // k.
    """

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
