"""Vocab-parallel cross-entropy against torch's over the whole vocabulary,
and against megatron-core's.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.tensor_parallel import cross_entropy
from meshwright.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from meshwright.tensor_parallel.layers import vocab_slice
from meshwright_launch.pool import RankPool
from tests.framework.tensor_parallel.ranks_of_tp import close, drawn, lonely_group, tp_group

B, S = 3, 5


def whole_case(vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(logits (B, S, V), labels (B, S) with ignored ones, gradient of the losses (B, S))."""
    logits = drawn(B, S, vocab_size, dtype=dtype) * 5
    logits[0, 0] += 1000  # exp of it is infinite: the largest logit must come off first
    labels = torch.randint(vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
    labels[0, 1:3] = torch.tensor([0, vocab_size - 1])
    labels[1, 2] = labels[2, 4] = -100
    return logits, labels, drawn(B, S, seed=2, dtype=torch.float64)


def plain(
    logits: Tensor, labels: Tensor, gradient: Tensor, **options: float
) -> tuple[Tensor, Tensor]:
    """torch's losses and gradient of the logits."""
    logits = logits.clone().requires_grad_()
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    )
    losses = losses.view(labels.shape) + z_loss * torch.logsumexp(logits, -1).square() * (
        labels != -100
    )
    losses.backward(gradient.to(losses.dtype))
    assert logits.grad is not None
    return losses.detach(), logits.grad


def split_rank(
    rank: int, tp: int, vocab_size: int, dtype: torch.dtype, tolerance: float, **options: float
) -> Tensor:
    group = tp_group(rank, tp)
    whole, labels, gradient = whole_case(vocab_size, dtype)
    rows = vocab_slice(vocab_size, rank, tp)
    count = rows.stop - rows.start
    # whatever a padding column holds must not matter
    local = torch.full((B, S, rows.padded), 1e5, dtype=dtype)
    local[..., :count] = whole[..., rows.start : rows.stop]
    local.requires_grad_()
    before = local.detach().clone()
    for rows_at_once in (B * S, 2):  # all tokens at once, and few at a time
        cross_entropy.rows_per_chunk, kept = (
            (lambda _, found=rows_at_once: found),
            cross_entropy.rows_per_chunk,
        )
        try:
            local.grad = None
            losses = vocab_parallel_cross_entropy(local, labels, group, vocab_size, **options)
            losses.backward(gradient.to(losses.dtype), retain_graph=True)
            first = local.grad
            local.grad = None
            losses.backward(gradient.to(losses.dtype))  # nothing was overwritten by the first
        finally:
            cross_entropy.rows_per_chunk = kept
        assert first is not None and local.grad is not None
        assert torch.equal(first, local.grad) and torch.equal(before, local)
        want_losses, want_gradient = plain(whole.to(losses.dtype), labels, gradient, **options)
        assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert local.grad.dtype == dtype
        close(losses.detach(), want_losses, tolerance)
        assert not losses[labels == -100].any()
        close(
            first[..., :count].to(want_gradient.dtype),
            want_gradient[..., rows.start : rows.stop],
            tolerance if dtype != torch.bfloat16 else 1e-2,
        )
        assert not first[..., count:].any() and not first[labels == -100].any()
    counted = group.traffic.counts["tp", "all_reduce"]
    assert counted.calls == 4  # two of each forward, none of backward
    numbers = 4 if options.get("label_smoothing") else 3
    assert counted.wire_bytes == 2 * numbers * B * S * losses.element_size() * 2 * (tp - 1) / tp
    return losses.detach()


@pytest.mark.parametrize(
    ("tp", "vocab_size", "dtype", "tolerance"),
    [
        (2, 64, torch.float64, 1e-12),
        (4, 257, torch.float64, 1e-12),
        (8, 9, torch.float64, 1e-12),
        (2, 65, torch.float32, 1e-6),
        (2, 65, torch.bfloat16, 1e-6),
    ],
)
def test_equals_torch_over_the_whole_vocabulary(
    pool: RankPool, tp: int, vocab_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    losses = pool.run(split_rank, tp, vocab_size, dtype, tolerance)
    assert all(torch.equal(losses[0], other) for other in losses)


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"z_loss": 1e-4}, {"label_smoothing": 0.3, "z_loss": 0.01}],
)
# padding; a rank with padding alone
@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 64), (4, 257), (8, 9)])
def test_label_smoothing_and_z_loss_equal_torch(
    pool: RankPool, tp: int, vocab_size: int, options: dict[str, float]
) -> None:
    losses = pool.run(partial(split_rank, **options), tp, vocab_size, torch.float64, 1e-12)
    assert all(torch.equal(losses[0], other) for other in losses)


def replicated_rank(rank: int, tp: int, **options: float) -> None:
    whole, labels, gradient = whole_case(11, torch.float64)
    logits = whole.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, labels, tp_group(rank, tp), 11, **options)
    losses.backward(gradient)
    want_losses, want_gradient = plain(whole, labels, gradient, **options)
    assert logits.grad is not None
    close(losses.detach(), want_losses, 1e-14)
    close(logits.grad, want_gradient, 1e-14)


def test_logits_that_are_whole_on_every_rank_are_taken_as_such(pool: RankPool) -> None:
    pool.run(replicated_rank, 2)
    pool.run(partial(replicated_rank, label_smoothing=0.1, z_loss=0.01), 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_rank_is_torchs_own(dtype: torch.dtype) -> None:
    whole, labels, gradient = whole_case(11, dtype)
    losses = vocab_parallel_cross_entropy(whole, labels, lonely_group(0, 1), 11)
    accurate = torch.float64 if dtype == torch.float64 else torch.float32
    assert losses.dtype == accurate
    assert torch.equal(losses, plain(whole.to(accurate), labels, gradient)[0])


def test_meta_logits_give_meta_losses() -> None:
    logits = torch.empty(B, S, 6, device="meta", dtype=torch.bfloat16)
    labels = torch.empty(B, S, device="meta", dtype=torch.int64)
    losses = vocab_parallel_cross_entropy(logits, labels, lonely_group(1, 2), 11)
    assert losses.is_meta and losses.shape == (B, S) and losses.dtype == torch.float32
