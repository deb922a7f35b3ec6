"""Attention in blocks of queries equals attention with one dense mask,
and builds no mask of all pairs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from meshwright_models import attention
from meshwright_models.attention import AttentionCore
from tests.framework.pipeline.kept import MadeBytes

LENGTH = 37


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    starts: Tensor | None,
    divisor: float | None,
) -> Tensor:
    """Attend with a mask built pair by pair. q, k, v: (B, H or G, S, d); starts: (B, S). Return (B,
    H, S, d).
    """
    batch, heads, length, size = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    seen = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for b in range(batch):
        begin = 0
        for i in range(length):
            if starts is not None and bool(starts[b, i]):
                begin = i
            seen[b, 0, i, max(begin, 0 if window is None else i + 1 - window) : i + 1] = True
    scores = (q @ k.transpose(-1, -2) / (divisor or size**0.5)).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def drawn_starts(form: str) -> Tensor | None:
    if form == "none":
        return None
    starts = torch.rand(2, LENGTH) < 0.2
    starts[:, 0] = True
    starts[0, 9:12] = True  # two documents of one token
    return starts


@pytest.mark.parametrize("block", [1, 8, 36, 37, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 20, 36, 37, 100])
@pytest.mark.parametrize("form", ["none", "documents", "documents without their values"])
def test_blocks_equal_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, form: str, window: int | None, block: int
) -> None:
    """Also by blocks where documents cannot be read: on a GPU."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    if form == "documents without their values":
        monkeypatch.setattr(attention, "can_read", lambda tensor: False)
    torch.manual_seed(block)
    q, k, v = (
        torch.randn(2, heads, LENGTH, 6, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    starts, divisor = drawn_starts(form), None if block == 8 else 3.0
    upstream = torch.randn(2, 4, LENGTH, 6, dtype=torch.float64)
    mixed, expected = (
        AttentionCore(window, divisor)(q, k, v, None, starts),
        dense(q, k, v, window, starts, divisor),
    )
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(out, (q, k, v), upstream) for out in (mixed, expected))
    for gradient, other in zip(found, wanted, strict=True):
        # window 1: zero for q
        assert float((gradient - other).norm()) <= 1e-12 * max(1.0, float(other.norm()))


class MaskSizes(TorchFunctionMode):
    """Recorder of the mask shapes that reach the attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.storages: set[int] = set()
        self.masks: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is F.scaled_dot_product_attention:
            self.masks.append(args[3])  # kept alive: no address is used twice
            self.shapes.append(tuple(args[3].shape))
            self.storages.add(args[3].data_ptr())
        return func(*args, **(kwargs or {}))


def test_masks_cover_what_a_block_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    q, k, v = (torch.randn(2, 2, LENGTH, 4) for _ in range(3))
    with MaskSizes() as windowed:
        AttentionCore(5)(q, k, v, None)
    assert windowed.shapes == [(8, 8), (8, 12), (8, 12), (8, 12), (5, 9)]
    assert len(windowed.storages) == 3, "blocks of one form share their mask"
    monkeypatch.setattr(attention, "can_read", lambda tensor: False)
    with MaskSizes() as documents:
        AttentionCore()(q, k, v, None, drawn_starts("documents"))
    assert documents.shapes == [
        (2, 1, 8, 8),
        (2, 1, 8, 16),
        (2, 1, 8, 24),
        (2, 1, 8, 32),
        (2, 1, 5, 37),
    ]


def kept_bytes(starts: Tensor, *drawn: Tensor) -> int:
    with MadeBytes() as made:
        out = AttentionCore()(*drawn, None, starts)
    assert out.shape == drawn[0].shape
    return made.bytes()


@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_cpu_nothing_kept_depends_on_the_documents(batch: int) -> None:
    """So that a dry run, which has no documents, counts a run's bytes: outputs twice,
    and a number per query.
    """
    q, k, v = (torch.randn(batch, heads, LENGTH, 4, requires_grad=True) for heads in (4, 2, 2))
    starts = drawn_starts("documents")
    assert starts is not None
    expected = batch * 4 * LENGTH * (4 + 4 + 1) * 4
    assert kept_bytes(starts[:batch], q, k, v) == expected
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(each) for each in (starts[:batch], q, k, v)]
        assert kept_bytes(*fake) == expected
