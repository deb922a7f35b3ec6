"""Check of ids and labels where tp splits the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

PRIVATE_TORCH = {
    "torch._assert_async": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


def check_range(ids: Tensor, stop: int, ignored: int = 0) -> None:
    """Raise RuntimeError unless ids (...) are from 0 to ``stop`` - 1 or ``ignored``;
    on CUDA asynchronously.

    torch checks this itself for a full table or full logits. Here an id that no tp rank owns would
    silently give zeros.
    """
    fits = ((ids >= 0) & (ids < stop) | (ids == ignored)).all()
    torch._assert_async(fits, f"index out of range: not from 0 to {stop - 1}")
