"""Triton kernel of 8-bit AdamW: dequantise both moments, update, quantise them again per block,
write the weights.

program      ROWS blocks of BLOCK elements, padded to COLUMNS, a power of two
arithmetic   the operations of the plain torch step, each rounded to nearest; ``fma`` where torch's kernels fuse
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)
"""Smallest normal float32, the divisor of a block of zeros."""


@triton.jit
def widen(codes, scales, levels, places, rows, inside, has_scale):
    """Decode (dequantise) a tile: float32 (ROWS, COLUMNS). A row has one scale."""
    level = tl.load(levels + tl.load(codes + places, mask=inside, other=0).to(tl.int32))
    return level * tl.load(scales + rows, mask=has_scale, other=0.0)[:, None]


@triton.jit
def narrow(numbers, state, tables, places, rows, inside, has_scale):
    """Quantise a tile and write its codes and scales. NaN in a block makes its scale NaN."""
    codes, scales = state
    code_of, border_of = tables
    sizes = tl.where(inside, tl.abs(numbers), 0.0)
    is_nan = tl.max((sizes != sizes).to(tl.int32), axis=1) > 0
    largest = tl.where(is_nan, float("nan"), tl.max(sizes, axis=1))
    tl.store(scales + rows, largest, mask=has_scale)
    divisor = tl.where(largest < TINY, TINY, largest)
    shares = tl.div_rn(numbers, tl.broadcast_to(divisor[:, None], numbers.shape))
    upper = (shares.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    above = shares > tl.load(border_of + upper)
    tl.store(codes + places, tl.load(code_of + upper) + above.to(tl.uint8), mask=inside)


@triton.jit
def step_blocks(
    target, moments, tables, numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Step ROWS blocks.

    target: (weights (n,) float32, gradient (n,), n). moments: (codes, scales) of the first, then of
        the second's root.
    tables: (levels, codes, borders), signed, then unsigned. numbers: those of StepNumbers.
    """
    weights, gradient, numel = target
    codes1, scales1, codes2, scales2 = moments
    levels1, code_of1, border_of1, levels2, code_of2, border_of2 = tables
    mix, beta2, fresh, largest_root, eps, shrink, size = numbers
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    places = rows[:, None] * BLOCK + columns
    inside = (columns < BLOCK) & (places < numel)
    has_scale = rows * BLOCK < numel
    new = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    mean = widen(codes1, scales1, levels1, places, rows, inside, has_scale)
    if mix < 0.5:
        mean = tl.fma(new - mean, tl.zeros_like(mean) + mix, mean)
    else:
        mean = tl.fma(new - mean, tl.zeros_like(mean) + (mix - 1.0), new)
    root = widen(codes2, scales2, levels2, places, rows, inside, has_scale)
    root = tl.sqrt_rn(tl.fma(new * fresh, new, root * root * beta2))
    narrow(mean, (codes1, scales1), (code_of1, border_of1), places, rows, inside, has_scale)
    narrow(root, (codes2, scales2), (code_of2, border_of2), places, rows, inside, has_scale)
    divisor = tl.div_rn(root, tl.zeros_like(root) + largest_root) + eps
    old = tl.load(weights + places, mask=inside, other=0.0)
    tl.store(weights + places, old * shrink + tl.div_rn(mean * size, divisor), mask=inside)
