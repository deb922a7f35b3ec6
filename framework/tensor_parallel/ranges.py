"""Check of ids and labels where tp splits the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def check_range(ids: Tensor, stop: int, ignored: int = 0) -> None:
    """Raise RuntimeError unless ids (...) are from 0 to ``stop`` - 1 or ``ignored``; on CUDA it comes later.

    torch raises for a whole table or whole logits. An id that no tp rank owns would silently count as zeros.
    """
    fits = ((ids >= 0) & (ids < stop) | (ids == ignored)).all()
    torch._assert_async(fits, f"index out of range: not from 0 to {stop - 1}")
