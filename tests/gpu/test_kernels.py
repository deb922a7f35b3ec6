"""The Triton kernels on CUDA: dropout's bits are those of the CPU,
and 8-bit AdamW's codes but for a few at a border.

``MESHWRIGHT_GPU_TESTS=cpu pytest -m gpu tests/gpu/test_kernels.py`` rehearses this file on a
machine without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config.optimizers import MOMENTS
from meshwright.current import CurrentMicrobatch
from meshwright.kernels import can_launch
from meshwright.optimizer.adamw import FlatAdamW
from meshwright.optimizer.eight_bit import BlockCodec
from meshwright.seeding import SeededDropout

DEVICE = os.environ.get("MESHWRIGHT_GPU_TESTS", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="needs a CUDA device, and `pytest -m gpu`",
    ),
]
Shard = tuple[int, int, int] | None


def dropped_on(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], shard: Shard
) -> list[Tensor]:
    """Output and input gradient of a dropout, on CPU."""
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 3, *shape).to(device, dtype)
    module = SeededDropout(
        0.3, 1234, "block0.after_mlp", CurrentMicrobatch(torch.tensor([5, 2**40, 7], device=device))
    ).to(device)
    module.shard = shard
    assert can_launch(x) or device == "cpu"
    y = module(x.requires_grad_())
    y.backward(upstream)
    assert x.grad is not None
    return [y.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "shard"),
    [
        ((1000, 4096), None),
        ((33,), (-1, 2, 3)),
        ((2000,), (1, 1, 2)),
        ((7, 1100), (1, 1, 3)),
        ((4, 64, 64), (1, 3, 4)),
    ],
)
def test_dropout(
    shape: tuple[int, ...], shard: Shard, dtype: torch.dtype, on_device: Callable[..., Any]
) -> None:
    found, expected = (
        on_device(dropped_on, device, dtype, shape, shard) for device in (DEVICE, "cpu")
    )
    assert all(map(torch.equal, found, expected))


def stepped_on(device: str, dtype: torch.dtype, block: int, numel: int) -> list[Tensor]:
    """Weights, codes and scales after four steps, on CPU."""
    torch.manual_seed(numel)
    parameter = nn.Parameter(torch.randn(numel).to(device))
    parameter.grad_dtype = None  # a gradient in 16 bits beside float32 weights
    groups = [{"params": [parameter], "codec": BlockCodec(block), "weight_decay": 0.1}]
    optimizer = FlatAdamW(groups, MOMENTS, None, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    assert can_launch(parameter) or device == "cpu"
    for _ in range(4):
        parameter.grad = (torch.randn(numel) * 10 ** (8 * torch.rand(numel) - 8)).to(device, dtype)
        optimizer.step()
    state = optimizer.state[parameter]
    return [each.detach().cpu() for each in (parameter, *state["exp_avg"], *state["exp_avg_sq"])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("block", "numel"), [(8, 512), (256, 2**20 + 100), (1000, 10**5), (4096, 2**16)]
)
def test_eight_bit_adamw(
    block: int, numel: int, dtype: torch.dtype, on_device: Callable[..., Any]
) -> None:
    found, expected = (
        on_device(stepped_on, device, dtype, block, numel) for device in (DEVICE, "cpu")
    )
    for mine, theirs in zip(found, expected, strict=True):
        if mine.dtype == torch.uint8:
            off = (mine.int() - theirs.int()).abs()
            assert int(off.max()) <= 1 and float((off > 0).float().mean()) < 0.001
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
