"""Quantisation to float8_e4m3fn with one power-of-two scale per row.

    amax      largest magnitude of a row along the contracted dim, over all tp ranks where tp cuts that dim
    exponent  largest k with amax x 2^k <= 448, the largest float8_e4m3fn value
    code      x 2^k, rounded to float8_e4m3fn
    value     code x 2^-k: exact in bfloat16 and wider, because a code has 4 significant bits

Each pass over a tensor is one operator and, on CUDA, one kernel (kernels/float8.py). Contiguous
rows that tp does not cut are read once, for exponents and codes. Elsewhere, and without Triton,
plain torch code gives the same bits.

A row's codes depend on that row alone. Micro-batches, data parallelism, pipeline stages, sequence
parallelism and tensor parallelism therefore do not change them. NaN and Inf become NaN or Inf.

Shapes: K the contracted dim, always the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.kernels import float8
from meshwright.mesh.comm import Group

MOST = 126
"""Largest magnitude of an exponent: both 2^k and 2^-k are normal float32 numbers."""


class Float8Tensor(NamedTuple):
    """A tensor in float8: value = code x 2^-exponent."""

    codes: Tensor  # (..., K) float8_e4m3fn
    exponents: Tensor  # (..., 1) int8


def to_codes(scaled: Tensor) -> Tensor:
    """Round values within [-448, 448], any shape, to float8_e4m3fn."""
    return scaled.to(torch.float8_e4m3fn)


def _exponents(x: Tensor) -> Tensor:
    """Compute :func:`exponents_of` in plain torch, from the float32 bits of a row's amax,
    1.f x 2^e.

    The largest code is 448 = 1.75 x 2^8, so k = 8 - e, minus 1 if 1.f > 1.75.
    """
    bits = x.abs().amax(-1, keepdim=True).float().view(torch.int32)
    exponent, fraction = (bits >> 23) - 127, bits & 0x7FFFFF
    return (8 - exponent - (fraction > 0x600000).int()).clamp(-MOST, MOST).to(torch.int8)


def _codes(x: Tensor, exponents: Tensor) -> Tensor:
    """Compute the codes of x (..., K), contiguous, in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return to_codes(wide * power_of_two(exponents)).contiguous()


def _values(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute :func:`dequantise` in plain torch."""
    wide = codes.to(torch.promote_types(dtype, torch.float32))
    return (wide * power_of_two(-exponents)).to(dtype)


_SCHEMAS = {
    "row_exponents": "(Tensor x) -> Tensor",
    "row_codes": "(Tensor x, Tensor exponents) -> Tensor",
    "row_values": "(Tensor codes, Tensor exponents, ScalarType dtype) -> Tensor",
    "quantise_rows": "(Tensor x) -> (Tensor, Tensor)",
}


def _operator(
    name: str, plain: Callable[..., Any], kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Register the operator ``meshwright::name``: on CUDA ``kernel`` if it takes the tensor,
    else ``plain``.
    """
    operator = custom_op(f"meshwright::{name}", plain, mutates_args=(), schema=_SCHEMAS[name])

    def on_cuda(first: Tensor, *rest: Any) -> Any:
        return kernel(first, *rest) if float8.takes(first) else plain(first, *rest)

    operator.register_kernel("cuda", on_cuda)
    operator.register_fake(fake)
    return operator


def _quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute codes and exponents in plain torch."""
    exponents = _exponents(x)
    return _codes(x, exponents), exponents


def _exponents_like(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.int8)


def _codes_like(x: Tensor, exponents: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn)


_row_exponents = _operator("row_exponents", _exponents, float8.exponents, _exponents_like)
_row_codes = _operator("row_codes", _codes, float8.encode, _codes_like)
_row_values = _operator(
    "row_values",
    _values,
    float8.decode,
    lambda codes, exponents, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
_rows = _operator(
    "quantise_rows",
    _quantise_rows,
    float8.quantise,
    lambda x: (_codes_like(x, x), _exponents_like(x)),
)


def exponents_of(x: Tensor) -> Tensor:
    """Return the exponent of each row: (..., K) -> (..., 1) int8. No communication."""
    found: Tensor = _row_exponents(x.detach())
    return found


def agree(exponents: Sequence[Tensor], group: Group | None) -> list[Tensor]:
    """All-reduce the exponents of rows that ``group`` cuts to their minimum,
    which the amax of the whole rows gives.

    Blocks. One message for all tensors, 2 (tp-1)/tp bytes on the wire per row. ``group`` None: rows
    are not cut.
    """
    if group is None or group.size == 1:
        return list(exponents)
    message = torch.cat([each.flatten() for each in exponents])
    group.all_reduce(message, "min").wait()
    parts = torch.split(message, [each.numel() for each in exponents])
    return [part.view(each.shape) for part, each in zip(parts, exponents, strict=True)]


def encode(x: Tensor, exponents: Tensor) -> Float8Tensor:
    """Quantise x (..., K) with the exponents (..., 1) of its rows."""
    return Float8Tensor(_row_codes(x.detach(), exponents), exponents)


def quantise(tensors: Sequence[Tensor], group: Group | None) -> list[Float8Tensor]:
    """Quantise tensors (..., K). ``group``: ranks that cut K, which agree on exponents and block;
    None: K is whole.
    """
    if group is None or group.size == 1:
        return [Float8Tensor(*_rows(each.detach())) for each in tensors]
    exponents = agree([exponents_of(each) for each in tensors], group)
    return [encode(each, mine) for each, mine in zip(tensors, exponents, strict=True)]


def dequantise(quantised: Float8Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (..., K) in ``dtype``, exactly."""
    found: Tensor = _row_values(quantised.codes, quantised.exponents, dtype)
    return found


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^k in float32, exactly: any shape, int8."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)
