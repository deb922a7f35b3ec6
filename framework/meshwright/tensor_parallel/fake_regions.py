"""Fake versions of megatron-core's regions for meta tensors: no communication.

Shapes, copies and memory are the same, so that the planner can measure a tensor-parallel layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.tensor_parallel.megatron import Mappings


class _Resize(torch.autograd.Function):
    """New empty tensor: (.., n, ..) -> (.., length, ..) along ``dim``;
    backward returns the input's shape.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int) -> Tensor:
        ctx.shape = x.shape
        shape = list(x.shape)
        shape[dim] = length
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.new_empty(ctx.shape), None, None


def mappings(size: int) -> Mappings:
    """Return fake mappings for a group of ``size`` ranks."""

    def passes(x: Tensor, group: Any) -> Tensor:
        return x.view_as(x)  # the real regions sum in place

    def lengthens(x: Tensor, group: Any, dim: int = 0) -> Tensor:
        return _Resize.apply(x, dim, x.shape[dim] * size)  # type: ignore[no-untyped-call,no-any-return]

    def shortens(x: Tensor, group: Any, dim: int = 0) -> Tensor:
        return _Resize.apply(x, dim, x.shape[dim] // size)  # type: ignore[no-untyped-call,no-any-return]

    return Mappings(
        passes, passes, lengthens, shortens, partial(lengthens, dim=-1), partial(shortens, dim=-1)
    )
