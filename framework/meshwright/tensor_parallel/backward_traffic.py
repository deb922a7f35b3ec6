"""Traffic counts of the collectives that megatron-core's regions run in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.mesh.comm import Group


class _CountGradient(torch.autograd.Function):
    """Identity; its backward counts the collective that follows, and makes the gradient contiguous.

    It runs just before the backward of a region. megatron-core sums ``gradient.contiguous()`` in
    place and returns ``gradient``, so a non-contiguous gradient would be returned unsummed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, operation: str, parts: int, own: bool) -> Tensor:
        ctx.group, ctx.operation, ctx.parts, ctx.own = group, operation, parts, own
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.group.begin_collective(ctx.operation, gradient, ctx.parts)
        if ctx.own or not gradient.is_contiguous():
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        return gradient, None, None, None, None


def count_backward(
    y: Tensor, group: Group, operation: str, parts: int, *, own: bool = False
) -> Tensor:
    """Attach the count of a backward collective to ``y``, the output of a megatron-core region;
    return ``y``.

    Args:
        parts: ratio of the collective's message to the bytes of ``y``.
        own: pass a copy of the gradient on, because the collective overwrites it.
    """
    if not y.requires_grad:
        return y
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda *_: group.end_collective())
    return _CountGradient.apply(y, group, operation, parts, own)  # type: ignore[no-any-return, no-untyped-call]
