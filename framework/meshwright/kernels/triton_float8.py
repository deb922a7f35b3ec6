"""Triton kernels of quantisation to float8_e4m3fn with a power-of-two scale per row:
see meshwright/fp8/quantise.py.

Matrices are x (R, K), K contracted. Its rows or its columns are contiguous; codes are always (R,
K), contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
"""Largest value of float8_e4m3fn, 1.75 x 2^8."""
MOST = tl.constexpr(126)


@triton.jit
def magnitude(x):
    """Return the bits of |x| in float32: their order is that of the magnitudes,
    with NaN above all.
    """
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of(bits):
    """Return the largest k, within 126, with amax x 2^k <= 448,
    from the bits of amax in float32.
    """
    k = 135 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(k, -MOST), MOST)


@triton.jit
def power_of_two(k):
    """Return 2^k in float32, |k| <= 126."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def code_of(x, k):
    """Round x 2^k to float8_e4m3fn; beyond its range and NaN: NaN."""
    scaled = x.to(tl.float32) * power_of_two(k)
    return tl.where(tl.abs(scaled) <= LARGEST, scaled, float("nan")).to(tl.float8e4nv)


@triton.jit
def quantise_row(x, codes, exponents, row_stride, length, LENGTH: tl.constexpr):
    """Quantise one contiguous row in one pass. LENGTH: power of two, at least ``length``."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LENGTH)
    inside = lane < length
    values = tl.load(x + row * row_stride + lane, mask=inside, other=0.0)
    k = exponent_of(tl.max(magnitude(values), axis=0))
    tl.store(exponents + row, k.to(tl.int8))
    tl.store(codes + row * length + lane, code_of(values, k), mask=inside)


@triton.jit
def find_exponents(
    x, exponents, strides, shape, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Find the exponents of ROWS rows by TILES tiles of COLUMNS columns."""
    row_stride, column_stride = strides
    num_rows, num_columns = shape
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for tile in range(TILES):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        place = row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
        largest = tl.maximum(largest, magnitude(tl.load(x + place, mask=inside, other=0.0)))
    tl.store(exponents + row, exponent_of(tl.max(largest, axis=1)).to(tl.int8), mask=row < num_rows)


@triton.jit
def encode_tile(x, codes, exponents, strides, shape, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Encode a tile with the exponents of its rows."""
    row_stride, column_stride = strides
    num_rows, num_columns = shape
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    values = tl.load(
        x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0
    )
    k = tl.load(exponents + row, mask=row < num_rows, other=0).to(tl.int32)
    tl.store(
        codes + row[:, None] * num_columns + column[None, :],
        code_of(values, k[:, None]),
        mask=inside,
    )


@triton.jit
def decode_tile(codes, values, exponents, shape, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the values of a tile in the dtype of ``values``."""
    num_rows, num_columns = shape
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    k = tl.load(exponents + row, mask=row < num_rows, other=0).to(tl.int32)
    found = (
        tl.load(codes + place, mask=inside, other=0.0).to(tl.float32) * power_of_two(-k)[:, None]
    )
    tl.store(values + place, found, mask=inside)
