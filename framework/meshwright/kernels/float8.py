"""Launches of the kernels that quantise to float8_e4m3fn;
the results equal those of meshwright/fp8/quantise.py.

A contiguous row is read once. A transposed matrix (columns of a weight), or a longer row, is read
twice, in tiles. Codes are always written contiguous along the contracted dim, as the product needs
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels import has_tools

FIRST_CAPABILITY = (8, 9)
"""Lowest compute capability of GPUs that convert to float8."""
LONGEST_ROW = 2**14
"""Most elements of a row that one program holds in registers."""
_TILES = {True: (4, 1024), False: (32, 128)}
"""True for contiguous rows, False for contiguous columns -> (rows, columns) of a tile."""


def takes(tensor: Tensor) -> bool:
    """Return whether the kernels take a CUDA tensor. Not float64: they scale in float32.
    Older GPUs lack float8.
    """
    is_wide = tensor.dtype == torch.float64
    return (
        has_tools()
        and not is_wide
        and torch.cuda.get_device_capability(tensor.device) >= FIRST_CAPABILITY
    )


def _matrix(x: Tensor) -> Tensor:
    """Return x (..., K) as a matrix (R, K) whose rows or columns are contiguous;
    copies if they are not.
    """
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _grid(matrix: Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-matrix.shape[0] // tile[0]), -(-matrix.shape[1] // tile[1])


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (..., K) and exponents (..., 1) int8 of x (..., K)."""
    from meshwright.kernels.triton_float8 import quantise_row

    matrix = _matrix(x)
    rows, length = matrix.shape
    if matrix.stride(1) != 1 or length > LONGEST_ROW:
        found = exponents(x)
        return encode(x, found), found
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    found = torch.empty((*x.shape[:-1], 1), dtype=torch.int8, device=x.device)
    if x.numel():
        width = 1 << (length - 1).bit_length()
        warps = min(16, max(1, width // 512))
        quantise_row[(rows,)](
            matrix, codes, found, matrix.stride(0), length, width, num_warps=warps
        )
    return codes, found


def exponents(x: Tensor) -> Tensor:
    """Return the exponents (..., 1) int8 of the rows of x (..., K)."""
    from meshwright.kernels.triton_float8 import find_exponents

    matrix, found = _matrix(x), torch.empty((*x.shape[:-1], 1), dtype=torch.int8, device=x.device)
    if x.numel():
        tile = _TILES[matrix.stride(1) == 1]
        programs, tiles = _grid(matrix, tile)
        find_exponents[(programs,)](
            matrix, found, matrix.stride(), tuple(matrix.shape), tiles, *tile
        )
    return found


def encode(x: Tensor, exponents: Tensor) -> Tensor:
    """Return the codes (..., K), contiguous, of x (..., K) with the exponents (..., 1)
    of its rows.
    """
    from meshwright.kernels.triton_float8 import encode_tile

    matrix, codes = _matrix(x), torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if x.numel():
        tile = _TILES[matrix.stride(1) == 1]
        shape = tuple(matrix.shape)
        encode_tile[_grid(matrix, tile)](
            matrix, codes, exponents.contiguous(), matrix.stride(), shape, *tile
        )
    return codes


def decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (..., K) of codes (..., K) in ``dtype``."""
    from meshwright.kernels.triton_float8 import decode_tile

    matrix = codes.reshape(-1, codes.shape[-1]).contiguous()
    values = codes.new_empty(codes.shape, dtype=dtype)
    if codes.numel():
        tile = _TILES[True]
        decode_tile[_grid(matrix, tile)](
            matrix, values, exponents.contiguous(), tuple(matrix.shape), *tile
        )
    return values
