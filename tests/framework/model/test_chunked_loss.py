"""Chunked cross-entropy of whole logits against torch's: values, gradients,
and the memory that it takes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model import chunked_loss
from meshwright.pipeline.values import cross_entropy
from tests.support.marks import long_row

N, V = 13, 37


def plain(
    output: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return torch's loss of all logits at once, with a graph of autograd."""
    logits = output if output.dtype == torch.float64 else output.float()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    return losses + z_loss * logits.logsumexp(-1).square() * (labels != -100)


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 0.3, "z_loss": 0.01}],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_equals_torch(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tolerance: float,
    options: dict[str, float],
    rows: int,
) -> None:
    monkeypatch.setattr(chunked_loss, "rows_per_chunk", lambda _: rows)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(N, V, generator=generator, dtype=torch.float64) * 5).to(dtype)
    logits[0] += 1000  # exp of it is infinite
    labels = torch.randint(V, (N,), generator=generator)
    labels[2:4] = torch.tensor([0, V - 1])
    labels[[1, 7]] = -100
    weights = torch.randn(N, generator=generator, dtype=torch.float64)
    mine, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    losses, want = cross_entropy(mine, labels, **options), plain(logits, labels, **options)
    assert (
        losses.dtype == want.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    )
    if not options:
        assert torch.equal(losses, want)
    torch.testing.assert_close(losses, want, rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=0)
    losses.backward(weights.to(losses.dtype), retain_graph=True)
    first, mine.grad = mine.grad, None
    losses.backward(weights.to(losses.dtype))  # the first overwrote nothing
    plain(theirs, labels, **options).backward(weights)
    assert first is not None and mine.grad is not None and theirs.grad is not None
    assert (
        mine.grad.dtype == dtype
        and torch.equal(first, mine.grad)
        and torch.equal(mine.detach(), logits)
    )
    assert (mine.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm()
    assert not mine.grad[labels == -100].any()


@pytest.mark.parametrize("label", [V, -1])
def test_labels_out_of_range_are_refused_as_by_torch(label: int) -> None:
    with pytest.raises(IndexError, match=r"Target .* is out of bounds"):
        cross_entropy(torch.zeros(2, V), torch.tensor([0, label]))


@pytest.mark.parametrize("options", [{}, long_row({"label_smoothing": 0.1, "z_loss": 1e-4})])
def test_the_loss_needs_its_gradient_and_a_few_chunks(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    """128 chunks, as 2**26 elements of V = 128k and 64k tokens: live bytes beside the logits,
    forward and backward.
    """
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.planner.operations import WorkRecorder
    from meshwright_plan.planner.profile import counting_group

    rows, tokens, columns = 8, 1024, 512
    monkeypatch.setattr(chunked_loss, "rows_per_chunk", lambda _: rows)
    logits = torch.empty(tokens, columns, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    peaks = []
    for loss in (cross_entropy, plain):
        with WorkRecorder(counting_group(1)) as recorder:
            before = recorder.live
            loss(logits, labels, **options).sum().backward()
        peaks.append(recorder.peak - before)
    of_logits, of_chunk, of_tokens = tokens * columns * 2, rows * columns * 4, 48 * tokens
    # the recorder may count the logits themselves
    assert peaks[0] <= of_logits + of_logits + 4 * of_chunk + of_tokens
    assert peaks[1] > 4 * of_logits
