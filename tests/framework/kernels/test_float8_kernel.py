"""The kernels of quantisation against the plain code, on values that float8 holds.

Triton's interpreter rounds to float8 in another way than a GPU; tests/gpu/test_fp8.py compares
rounded codes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.fp8 import quantise as plain
from meshwright.kernels import float8


def held(*shape: int, dtype: torch.dtype, along: int = -1) -> Tensor:
    """Values of float8, each row (or column) times a power of two of its own;
    the first row has zeros alone.
    """
    codes = torch.randint(-448, 449, shape, generator=torch.Generator().manual_seed(1)).float()
    values = codes.to(torch.float8_e4m3fn).float().movedim(along, -1)
    values = values * 2.0 ** (
        torch.arange(values[..., 0].numel()).view(*values.shape[:-1], 1) % 17 - 14
    )
    values[..., 0, :] = 0.0
    return values.movedim(-1, along).to(dtype).contiguous()


def as_bytes(codes: Tensor) -> Tensor:
    assert codes.is_contiguous()
    return codes.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3, 17), (2, 3, 130), (40, 200), (2, float8.LONGEST_ROW + 100)])
@pytest.mark.parametrize("transposed", [False, True])
def test_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype, transposed: bool, interpreter: None
) -> None:
    x = held(*shape, dtype=dtype, along=-2 if transposed else -1)
    x = x.transpose(-1, -2) if transposed else x
    exponents = plain._exponents(x)
    codes = as_bytes(plain._codes(x, exponents))
    found, of_rows = float8.quantise(x)
    assert torch.equal(of_rows, exponents) and torch.equal(float8.exponents(x), exponents)
    assert torch.equal(as_bytes(found), codes) and torch.equal(
        as_bytes(float8.encode(x, exponents)), codes
    )
    assert torch.equal(float8.decode(found, exponents, torch.float32), x.float())


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float64, (9, 0), False),
        (torch.bfloat16, (8, 0), False),
    ],
)
def test_where_they_are_taken(
    dtype: torch.dtype, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale in float32 would round float64 twice; an A100 has no float8."""
    monkeypatch.setattr(float8, "has_tools", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert float8.takes(torch.ones(2, 16, dtype=dtype)) == expected


def test_nan_and_infinity_stay_one_of_the_two(interpreter: None) -> None:
    x = torch.full((3, 64), 448.0, dtype=torch.bfloat16)
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    codes, exponents = float8.quantise(x)
    values = float8.decode(codes, exponents, torch.float32)
    assert not values[0, 3].isfinite() and not values[1, 4].isfinite()
    assert values.isfinite().sum() == x.numel() - 2 and (values[2] == 448).all()
