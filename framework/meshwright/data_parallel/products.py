"""Weight gradients that a GEMM adds to a bucket's float32 gradients (Megatron-LM's gradient
accumulation fusion).

plain   dW = gy^T x   16 bits, a tensor of its own         sum += dW   a second kernel, 10 bytes per element
here    sum += gy^T x in one GEMM, whose output is the sum: 8 bytes per element, and no rounding of dW to 16 bits
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.kernels import device_kind
from meshwright.parameters import GradientSum, WeightProduct

PRIVATE_TORCH = {
    "torch._subclasses.fake_tensor.FakeTensor": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


def adds_products(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Return whether this device's GEMM adds products of the parameter's 16-bit dtype
    to a sum in ``dtype``.
    """
    if device_kind(parameter) != "cuda" or parameter.dim() != 2 or dtype != torch.float32:
        return False
    return parameter.dtype in (torch.bfloat16, torch.float16) and _has_kernel(
        parameter.device, parameter.dtype
    )


def offer_products(
    parameter: nn.Parameter,
    dtype: torch.dtype,
    begin: Callable[[], tuple[Tensor, bool] | None],
    *,
    finish: Callable[[Tensor], None],
) -> None:
    """Attach a ``GradientSum`` to a parameter, so that backward adds its products by GEMM,
    if the device's GEMM can.

    Args:
        dtype: dtype of the gradient sum.
        begin: function that returns the sum, and True if the product overwrites it; None: there is
            no sum any more.
        finish: the parameter's hook, which counts the gradient.
    """
    if not adds_products(parameter, dtype):
        return

    def add(_: Tensor, product: WeightProduct) -> None:
        begun = begin()
        if begun is not None:
            total, is_first = begun
            add_product(total, product, first=is_first)

    parameter.gradient_sum = GradientSum(add, finish)  # type: ignore[attr-defined]


@cache
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel exists, by running it once:
    torch versions differ in the output dtypes they accept.
    """
    factor = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        add_product(torch.zeros(16, 16, device=device), WeightProduct(factor, factor), first=False)
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def add_product(total: Tensor, product: WeightProduct, *, first: bool) -> None:
    """Add gy^T x to ``total`` (O, I) in float32, in place; with ``first`` overwrite it.

    A CPU has no such kernel. There the factors are converted first, which gives the same sums: the
    tests' reference.
    """
    gy, x = product.matrices()
    beta = 0 if first else 1
    if device_kind(total) == "cpu":
        total.addmm_(gy.t().to(total.dtype), x.to(total.dtype), beta=beta)
    elif type(total) is FakeTensor and total.device.type == "cpu":
        total.mul_(beta)  # in a dry run: torch 2.11 has no such product of fake tensors
    else:
        torch.ops.aten.addmm.dtype_out(total, gy.t(), x, total.dtype, beta=beta, alpha=1, out=total)
