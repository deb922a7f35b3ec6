"""Product of two quantised matrices: ``torch._scaled_mm`` on CUDA, emulated elsewhere.
Wraps private torch APIs.

The emulation multiplies the dequantised values in the training dtype. Its operands are exactly
those of the kernel. The results differ only by the accumulation inside a dot product and by
rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.fp8.quantise import Float8Tensor, dequantise, power_of_two

PRIVATE_TORCH = {
    "torch._C._len_torch_function_stack": "2.11-2.15",
    "torch._scaled_mm": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

MULTIPLE = 16
"""Both dims of a weight must be a multiple of it on CUDA (cuBLAS and CUTLASS float8 kernels)."""


def product(x: Float8Tensor, weight: Float8Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T in ``dtype``: x (..., K), weight (N, K) -> (..., N).
    The kernel runs on CUDA in bfloat16 alone.
    """
    if x.codes.is_cuda and dtype == torch.bfloat16:
        return _scaled_mm(x, weight)
    return F.linear(dequantise(x, dtype), dequantise(weight, dtype))


def _scaled_mm(x: Float8Tensor, weight: Float8Tensor) -> Tensor:
    """Return the product by torch's float8 kernel with rowwise scales, in bfloat16."""
    rows = x.codes.reshape(-1, x.codes.shape[-1])
    y = torch._scaled_mm(
        rows,
        weight.codes.t(),  # column-major, as the kernel needs it
        scale_a=power_of_two(-x.exponents).reshape(-1, 1).contiguous(),
        scale_b=power_of_two(-weight.exponents).reshape(1, -1).contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y.view(*x.codes.shape[:-1], y.shape[-1])


def has_modes() -> bool:
    """Return whether a torch function mode is active; works within torch.compile too."""
    return torch._C._len_torch_function_stack() > 0
