"""Peak memory and CPU time of the cross-entropy by chunks of tokens,
beside torch's on float32 logits.

python benchmarks/loss.py     (OMP_NUM_THREADS=1 is set; times are the best of five, of both in turn)
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.pipeline.values import cross_entropy
from meshwright_plan.planner.operations import WorkRecorder
from meshwright_plan.planner.profile import counting_group


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    """Return torch's loss of logits (N, V), labels (N,) -> (N,), in float32."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


LOSSES = {"chunks": cross_entropy, "torch": plain}


def peak_gb(name: str, tokens: int, vocab_size: int) -> float:
    """Return the peak of live bytes of forward and backward beside bfloat16 logits (tokens, V),
    on meta.
    """
    logits = torch.empty(
        tokens, vocab_size, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    with WorkRecorder(counting_group(1)) as recorder:
        before = recorder.live
        LOSSES[name](logits, labels).sum().backward()
    return (recorder.peak - before) / 1e9


def best_s(dtype: torch.dtype, tokens: int, vocab_size: int) -> dict[str, float]:
    """Return each loss's CPU seconds of forward and backward over logits (tokens, V)."""
    logits = torch.randn(tokens, vocab_size).to(dtype).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,))
    found = dict.fromkeys(LOSSES, float("inf"))
    for _ in range(5):
        for name, loss in LOSSES.items():
            logits.grad = None
            start_s = time.process_time()
            loss(logits, labels).sum().backward()
            found[name] = min(found[name], time.process_time() - start_s)
    return found


if __name__ == "__main__":
    for name in LOSSES:
        print(
            f"{name:8} peak {peak_gb(name, 8192, 128256):.2f} GB beside 8,192 x 128,256 bfloat16"
            " logits"
        )
    for dtype in (torch.float32, torch.bfloat16):
        times = best_s(dtype, 2048, 32000)
        words = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in times.items())
        print(f"{dtype}: {words}, ratio {times['chunks'] / times['torch']:.2f}")
