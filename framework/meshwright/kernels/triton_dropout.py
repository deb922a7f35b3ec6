"""Triton kernel of layout-free dropout: the hash of :func:`meshwright.seeding.keep_mask`,
in unsigned arithmetic.

    one sample, local     |run 0     |run 1     |            element i is in run o = i // run
    whole activation      |.|run 0|..|.|run 1|..|            at i + (o * (count - 1) + index) * run

Unsigned 64-bit products wrap, and ``>>`` is the logical shift.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(z):
    """Apply splitmix64's finaliser."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def drop_block(x, y, drawn, kept, shape, ELEMENTS: tl.constexpr, IS_SHARDED: tl.constexpr):
    """Drop ELEMENTS neighbouring elements of one sample. x, y: (B, numel), contiguous.

    drawn: (samples (B,) int64, key () int64). kept: (threshold of 31 bits, 1 / (1 - p)).
    shape: (numel, run, count, index), see the drawing above.
    """
    samples, key = drawn
    threshold, scale = kept
    numel, run, count, index = shape
    programs = (numel - 1) // ELEMENTS + 1
    sample = tl.program_id(0) // programs
    first = (tl.program_id(0) % programs).to(tl.int64) * ELEMENTS
    lane = tl.arange(0, ELEMENTS)
    position = first + lane
    inside = position < numel
    place = sample.to(tl.int64) * numel + position
    if IS_SHARDED:
        start = first % run
        if run >= ELEMENTS:
            ahead = (start + lane >= run).to(tl.int64)
        else:
            ahead = ((start.to(tl.int32) + lane) // run).to(tl.int64)
        position += ((first // run + ahead) * (count - 1) + index) * run
    of_sample = mix((tl.load(samples + sample).to(tl.uint64) * GOLDEN) ^ tl.load(key).to(tl.uint64))
    bits = mix(position.to(tl.uint64) * GOLDEN + of_sample)
    is_kept = ((bits >> 32) & 0x7FFFFFFF).to(tl.int64) >= threshold
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, values * is_kept.to(tl.float32) * scale, mask=inside)
