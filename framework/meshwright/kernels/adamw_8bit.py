"""Operator that steps 8-bit AdamW over one flat parameter in one kernel,
without temporary memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import can_launch

LARGEST_BLOCK = 4096
"""Largest quantisation block, in elements, that a program of the kernel holds in registers."""
_ELEMENTS = 1024
"""Elements per program, for blocks that are smaller."""
_SCHEMA = (
    "(Tensor(a!) weights, Tensor gradient, Tensor(b!)[] moments, Tensor[] tables, float[] numbers,"
    " int block) -> ()"
)


class StepNumbers(NamedTuple):
    """Scalars of one step, rounded to float32 by the launch."""

    mix: float
    """1 - beta1, the share of the gradient in the first moment."""
    beta2: float
    fresh: float
    """1 - beta2."""
    largest_root: float
    """Square root of the second moment's bias correction."""
    eps: float
    shrink: float
    """1 - learning rate times weight decay."""
    size: float
    """Negative learning rate over the first moment's bias correction."""


def takes(weights: Tensor, block: int) -> bool:
    """Return whether the kernel can step these weights: float32 on CUDA,
    in blocks of at most LARGEST_BLOCK.
    """
    return can_launch(weights) and weights.dtype == torch.float32 and block <= LARGEST_BLOCK


def step_8bit(
    weights: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    tables: Sequence[Tensor],
    numbers: StepNumbers,
    block: int,
) -> None:
    """Step flat weights (n,) float32 and both quantised moments in place.

    Args:
        gradient: (n,), of any floating-point dtype.
        moments: codes (n,) uint8 and scales (blocks,) float32 of the first moment, then of the
            second one's root.
        tables: levels (255,), codes (65536,) and borders (65536,) of the signed quantiser, then of
            the unsigned one.
        block: elements per scale, at most LARGEST_BLOCK.
    """
    OPERATOR(weights, gradient, list(moments), list(tables), list(numbers), block)


@torch.library.custom_op(
    "meshwright::adamw_8bit",
    mutates_args=("weights", "moments"),
    device_types="cuda",
    schema=_SCHEMA,
)
def _step(
    weights: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    tables: list[Tensor],
    numbers: list[float],
    block: int,
) -> None:
    from meshwright.kernels.triton_adamw_8bit import step_blocks

    columns = 1 << (block - 1).bit_length()
    rows = max(_ELEMENTS // columns, 1)
    numel = weights.numel()
    if numel:
        grid = (-(-numel // (rows * block)),)
        shape, scalars = (rows, columns, block), tuple(numbers)
        states, lookups = tuple(moments), tuple(tables)
        target, num_warps = (weights, gradient, numel), 8 if columns > 1024 else 4
        step_blocks[grid](
            target, states, lookups, scalars, *shape, num_warps=num_warps, enable_fp_fusion=False
        )


@_step.register_fake
def _step_fake(
    weights: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    tables: list[Tensor],
    numbers: list[float],
    block: int,
) -> None:
    """Change no shape and allocate nothing."""


OPERATOR = torch.ops.meshwright.adamw_8bit
