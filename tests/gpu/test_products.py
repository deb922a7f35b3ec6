"""The GEMM that adds a product of 16-bit factors to a float32 sum, on the device."""

from __future__ import annotations

import pytest
import torch

from meshwright.data_parallel.products import add_product, adds_products
from meshwright.parameters import WeightProduct

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_added_in_float32(dtype: torch.dtype) -> None:
    gy, x = (torch.randn(2, 96, size, device="cuda", dtype=dtype) for size in (64, 48))
    total = torch.full((64, 48), torch.nan, device="cuda")
    assert adds_products(torch.empty(64, 48, device="cuda", dtype=dtype), torch.float32)
    for first in (True, False):
        add_product(total, WeightProduct(gy, x), first=first)
    expected = 2 * gy.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-4)
