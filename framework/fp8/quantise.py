"""Quantisation to float8_e4m3fn with one power-of-two scale per row.

    amax      largest magnitude of a row along the contracted dim, over all tp ranks where tp cuts that dim
    exponent  largest k with amax x 2^k <= 448, the largest float8_e4m3fn value
    code      x 2^k, rounded to float8_e4m3fn
    value     code x 2^-k: exact in bfloat16 and wider, because a code has 4 significant bits

A row's codes depend on that row alone. Micro-batches, data parallelism, pipeline stages, sequence parallelism and
tensor parallelism therefore do not change them. A NaN or Inf stays one of the two.

Shapes: K the contracted dim, always the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.mesh.comm import Group

MOST = 126
"""Largest magnitude of an exponent: both 2^k and 2^-k are normal float32 numbers."""


class Quantised(NamedTuple):
    """A tensor in float8: value = code x 2^-exponent."""

    codes: Tensor  # (..., K) float8_e4m3fn
    exponents: Tensor  # (..., 1) int8


def to_codes(scaled: Tensor) -> Tensor:
    """Round values within [-448, 448], any shape, to float8_e4m3fn."""
    return scaled.to(torch.float8_e4m3fn)


def exponents_of(x: Tensor) -> Tensor:
    """Return the exponent of each row: (..., K) -> (..., 1) int8. No communication.

    It is read from the bits of the row's amax in float32, 1.f x 2^e: 448 = 1.75 x 2^8.
    """
    bits = x.detach().abs().amax(-1, keepdim=True).float().view(torch.int32)
    exponent, fraction = (bits >> 23) - 127, bits & 0x7FFFFF
    return (8 - exponent - (fraction > 0x600000).int()).clamp(-MOST, MOST).to(torch.int8)


def agree(exponents: Sequence[Tensor], group: Group | None) -> list[Tensor]:
    """All-reduce exponents to the smallest over the ranks that hold parts of the rows: the amax of the whole rows.

    Blocks. One message for all tensors, 2 (tp-1)/tp bytes on the wire per row. ``group`` None: rows are whole here.
    """
    if group is None or group.size == 1:
        return list(exponents)
    message = torch.cat([each.flatten() for each in exponents])
    group.all_reduce(message, "min").wait()
    parts = torch.split(message, [each.numel() for each in exponents])
    return [part.view(each.shape) for part, each in zip(parts, exponents, strict=True)]


def encode(x: Tensor, exponents: Tensor) -> Quantised:
    """Quantise x (..., K) with the exponents (..., 1) of its rows."""
    scaled = x.detach().to(torch.promote_types(x.dtype, torch.float32)) * power_of_two(exponents)
    return Quantised(to_codes(scaled), exponents)


def quantise(tensors: Sequence[Tensor], group: Group | None) -> list[Quantised]:
    """Quantise tensors (..., K), whose contracted dim the ranks of ``group`` share; None: K is whole here. Blocks."""
    exponents = agree([exponents_of(each) for each in tensors], group)
    return [encode(each, mine) for each, mine in zip(tensors, exponents, strict=True)]


def dequantise(quantised: Quantised, dtype: torch.dtype) -> Tensor:
    """Return the values (..., K) in ``dtype``, exactly."""
    wide = torch.promote_types(dtype, torch.float32)
    return (quantised.codes.to(wide) * power_of_two(-quantised.exponents)).to(dtype)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^k in float32, exactly: any shape, int8."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)
