"""Weight-decomposed adapters (Liu et al. 2024, "DoRA"):
each output row has a trained magnitude beside its direction.

    v = base(x) + s B(A(x))                          LoRA, s = alpha / rank
    y = v + c (v - bias)                             c = m / |W + s B A| - 1, one number for each output
    m = |W| + lora_magnitude                         |.|: norm of a row; lora_magnitude (O,) begins at zero

Backward treats |W + s B A| as a constant (section 4.3 of the paper). The parameter is m - |W|, the
magnitude minus the norm of the frozen row: it starts at zero for any base, and 16 bits resolve its
steps. Its gradient is that of m.

    |W + s B A|^2 = |W|^2 + 2 s (B . W A^T) + s^2 (B A A^T . B)          sums over rows: O (I + rank) numbers read

So no tensor of the weight's size is made. Column linears hold whole rows. A row linear holds a part
of each row, and all-reduces the two sums, (2, O), over tp in each forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MAGNITUDE = "lora_magnitude"
"""Name of the parameter (O,) of the target."""


def decompose(module: nn.Module, down: Tensor, up: Tensor, factor: float, v: Tensor) -> Tensor:
    """Return y (B, S, O) of a target's output ``v`` with its low-rank part, in local shapes.

    Collective over tp for row linears (all-reduce of 8 O bytes, 16 O in float64) and for column
    linears whose outputs are gathered, or shared by several ranks. Blocks.

    Args:
        down: A (rank, I). ``up``: B (O, rank).
        factor: s.
    """
    before, after = row_norms(module, down, up, factor)
    change = (before + module.get_parameter(MAGNITUDE)) / torch.where(after > 0, after, 1.0) - 1
    bias: Tensor | None = getattr(module, "bias", None)
    spread = getattr(module, "of_outputs", None)
    if spread is None:
        return v + change.to(v.dtype) * (v if bias is None else v - bias)
    if bias is None:
        return v + spread(change).to(v.dtype) * v  # type: ignore[no-any-return]
    change, bias = spread(torch.stack((change, bias.to(change.dtype)))).to(v.dtype)
    return v + change * (v - bias)  # type: ignore[no-any-return]


@torch.no_grad()
def row_norms(module: nn.Module, down: Tensor, up: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return |W| and |W + s B A| of the rows that this rank's outputs have, (O,) float32,
    or float64 with such weights.

    Constants of backward.
    """
    weight: Any = module.weight
    weight, down, up = weight.detach(), down.detach(), up.detach()
    dtype = torch.promote_types(weight.dtype, torch.float32)
    before = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
    # B (O, rank), W A^T (O, rank)
    wide, across = up.to(dtype), torch.mm(weight, down.t()).to(dtype)
    square = torch.mm(wide, torch.mm(down.to(dtype), down.t().to(dtype)))  # B A A^T (O, rank)
    after = before + factor * ((2 * across + factor * square) * wide).sum(1)
    whole = getattr(module, "whole_sums", None)
    sums = torch.stack((before, after))
    before, after = (sums if whole is None else whole(sums)).clamp_min(0).sqrt()
    return before, after


def row_lengths(weight: Tensor) -> Tensor:
    """Return the norms of a whole weight's rows, (O, I) -> (O,) float64."""
    found: Tensor = torch.linalg.vector_norm(weight.double(), dim=1)
    return found


def merged(weight: Tensor, low: Tensor, magnitude: Tensor) -> Tensor:
    """Return m (W + s B A) / |W + s B A| of whole matrices (O, I) float64; ``low``: s B A."""
    norm = row_lengths(weight + low)
    change = (row_lengths(weight) + magnitude) / torch.where(norm > 0, norm, 1.0)
    return (weight + low) * change.unsqueeze(1)
