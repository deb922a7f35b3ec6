"""Operator for layout-free dropout in one kernel, which also draws the mask.
Backward draws it again from the keys.

Shapes: B samples of the micro-batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import can_launch

_ELEMENTS = 1024
"""Elements per program of the kernel."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCHEMA = "(Tensor x, Tensor samples, Tensor key, float p, int run, int count, int index) -> Tensor"


def takes(x: Tensor) -> bool:
    """Return whether the kernel can drop elements of x. Not under torch.compile,
    which fuses the plain code itself.
    """
    return can_launch(x) and x.dtype in _DTYPES and not torch.compiler.is_compiling()


def drop_elements(
    x: Tensor, samples: Tensor, key: Tensor, p: float, shard: tuple[int, int, int] | None = None
) -> Tensor:
    """Return ``x * mask / (1 - p)`` with the mask of :func:`meshwright.seeding.keep_mask`;
    saves no mask for backward.

    Args:
        x: (B, ...), local, in float32 or 16 bits, on CUDA.
        samples: (B,) int64, global indices. ``key``: () int64.
        p: fraction of elements dropped, 0 < p < 1.
        shard: (dim, index, count), the slice of the whole activation that is local.
    """
    dim, index, count = shard or (1, 0, 1)
    run = math.prod(x.shape[dim % x.dim() if x.dim() > 1 else 1 :])
    y: Tensor = OPERATOR(x, samples, key, p, run, count, index)
    return y


@torch.library.custom_op(
    "meshwright::dropout", mutates_args=(), device_types="cuda", schema=_SCHEMA
)
def _drop(
    x: Tensor, samples: Tensor, key: Tensor, p: float, run: int, count: int, index: int
) -> Tensor:
    """Launch the kernel.

    ``run``: number of consecutive local elements of a sample that are consecutive in the whole
        activation too.
    """
    from meshwright.kernels.triton_dropout import drop_block

    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        numel = x.numel() // x.shape[0]
        grid = (x.shape[0] * -(-numel // _ELEMENTS),)
        drawn = (samples, key)
        kept = (int(p * 2**31), 1.0 / (1.0 - p))
        shape = (numel, run, count, index)
        drop_block[grid](x, y, drawn, kept, shape, _ELEMENTS, count > 1, enable_fp_fusion=False)
    return y


@_drop.register_fake
def _drop_fake(
    x: Tensor, samples: Tensor, key: Tensor, p: float, run: int, count: int, index: int
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, samples, key, *ctx.numbers = inputs
    ctx.save_for_backward(samples, key)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (OPERATOR(gradient, *ctx.saved_tensors, *ctx.numbers), *[None] * 6)


_drop.register_autograd(_backward, setup_context=_save)
OPERATOR = torch.ops.meshwright.dropout
