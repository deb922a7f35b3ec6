"""Attention with documents and windows by FlexAttention's kernels on CUDA,
against the masks of a CPU.

``MESHWRIGHT_GPU_TESTS=cpu pytest -m gpu tests/gpu/test_attention.py`` rehearses this file on a
machine without a GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.context_parallel.order import ORDERS
from meshwright_models.attention import AttentionCore

DEVICE = os.environ.get("MESHWRIGHT_GPU_TESTS", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="needs a CUDA device, and `pytest -m gpu`",
    ),
]


def attended_on(
    device: str,
    dtype: torch.dtype,
    length: int,
    window: int | None,
    share: float | None,
    cp: int = 1,
) -> list[Tensor]:
    """Output and gradients of q, k and v, in float64 on CPU; 6 heads of 64, 2 key-value heads.

    ``cp``: the queries are those of rank 0 of so many.
    """
    torch.manual_seed(length)
    of_rank = ORDERS["zigzag"](length, cp)[0] if cp > 1 else range(length)
    drawn = [torch.randn(2, heads, length, 64).to(device, dtype) for heads in (6, 2, 2)]
    drawn[0] = drawn[0][:, :, of_rank]
    for each in drawn:
        each.requires_grad_()
    upstream = torch.randn(2, 6, len(of_rank), 64).to(device, dtype)
    starts = None if share is None else (torch.rand(2, length) < share).to(device)
    core = AttentionCore(window)
    if device == "cuda":
        assert core.form(drawn[0], cp > 1 or starts is not None) == "flex"
    mixed = core(*drawn, None, starts, None if cp == 1 else torch.tensor([of_rank], device=device))
    return [
        each.detach().cpu().double()
        for each in (mixed, *torch.autograd.grad(mixed, drawn, upstream))
    ]


def waits_of(device: str, length: int) -> int:
    """Synchronising calls that torch counts in a forward and backward with new documents,
    after one that compiles.
    """
    attended_on(device, torch.bfloat16, length, None, 0.01)
    q, k, v = (
        torch.randn(2, 2, length, 64, device=device, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    starts = torch.rand(2, length, device=device) < 0.02
    AttentionCore()(q, k, v, None, starts).sum().backward()
    if device == "cpu":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        AttentionCore()(q, k, v, None, starts.roll(5, 1)).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in found)


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("length", "window", "share"),
    [(515, None, 0.01), (1024, 200, 0.004), (1000, 300, None), (128, None, 0.3)],
)
def test_numbers(
    length: int,
    window: int | None,
    share: float | None,
    dtype: torch.dtype,
    bar: float,
    on_device: Callable[..., Any],
) -> None:
    found = on_device(attended_on, DEVICE, dtype, length, window, share)
    expected = attended_on("cpu", torch.float32, length, window, share)
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).norm()) <= bar * float(theirs.norm())


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("window", "share"), [(None, None), (200, None), (None, 0.01)])
def test_numbers_of_some_queries(
    window: int | None,
    share: float | None,
    dtype: torch.dtype,
    bar: float,
    on_device: Callable[..., Any],
) -> None:
    """As a context-parallel rank attends."""
    found = on_device(attended_on, DEVICE, dtype, 1024, window, share, 2)
    expected = attended_on("cpu", torch.float32, 1024, window, share, 2)
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).norm()) <= bar * float(theirs.norm())


def test_the_host_never_waits_for_documents(on_device: Callable[..., Any]) -> None:
    assert on_device(waits_of, DEVICE, 1024) == 0
