"""Attention functions of a user: plain torch, with and without the places of some queries."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    dropout: nn.Module | None,
    starts: Tensor | None,
    window: int | None,
    places: Tensor | None = None,
) -> Tensor:
    """Attend causally, within documents and a window."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    keys = torch.arange(k.shape[-2], device=q.device)
    queries = keys[None] if places is None else places
    seen = queries[..., None] >= keys  # (1 or B, Q, S)
    if window is not None:
        seen = seen & (queries[..., None] - keys < window)
    if starts is not None:
        document = starts.cumsum(-1)
        of_queries = document.gather(1, queries.expand(len(document), -1))
        seen = seen & (of_queries[..., None] == document[:, None])
    seen = seen[:, None]
    if dropout is None:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return dropout(scores.masked_fill(~seen, -math.inf).softmax(-1)) @ v


def attend_some(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Attend, also with some of the queries."""
    return attend(q, k, v, **given)


attend_some.takes_places = True  # type: ignore[attr-defined]


def attend_wrongly(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Attend, and return all heads in one dim."""
    return attend(q, k, v, **given).transpose(1, 2).flatten(2)
