"""Capacity of experts: the most tokens of one sample that an expert takes, and the choice of these tokens.

    capacity C = ceil(factor x k S / E)     an expert takes C of the k S choices of a sample; a factor of 1: even load
    priority   (score, place)               the highest score of the router first; of equal ones the earlier token

The rule is that of one sample: it does not depend on the other samples of a micro-batch, and ranks with parts of a
sample gather its choices. It drops tokens in training alone, as DeepSeek-V2 does (arXiv:2405.04434, section 2.2.4): a
later token decides whether an earlier one is dropped, which no generation could repeat.

Shapes: B samples, S tokens, E experts, k experts of a token, R = S k choices of a sample, C capacity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.models.expert_balance import count_tokens


def capacity_of(factor: float, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Return the capacity: the most tokens of a sample that an expert takes, at least 1."""
    return max(1, math.ceil(factor * top_k * num_tokens / num_experts))


def within_capacity(ids: Tensor, scores: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the mask of the choices within capacity, (B, S, k) bool. ids: (B, S, k) int64; scores: (B, S, k) of ids.

    S must be all tokens of the samples, in their order.
    """
    order, ranks = _by_priority(ids, scores, num_experts)
    return torch.empty_like(order).scatter_(1, order, ranks).view_as(ids) < capacity


def capacity_gap(ids: Tensor, scores: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the least difference between the last score that an expert takes and the next, (); infinity without one.

    Arguments are those of :func:`within_capacity`.
    """
    order, ranks = _by_priority(ids, scores, num_experts)
    ordered = scores.flatten(1).gather(1, order)
    gaps = (ordered[:, :-1] - ordered[:, 1:]).masked_fill(ranks[:, 1:] != capacity, torch.inf)
    return gaps.min() if gaps.numel() else scores.new_full((), torch.inf)


def _by_priority(ids: Tensor, scores: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the choices of each sample by expert, then by priority, (B, R), and their ranks within the expert."""
    chosen = ids.flatten(1)
    by_score = scores.flatten(1).argsort(dim=1, descending=True, stable=True)
    order = by_score.gather(1, chosen.gather(1, by_score).argsort(dim=1, stable=True))
    counts = count_tokens(ids, num_experts)
    starts = (counts.cumsum(1) - counts).gather(1, chosen.gather(1, order))
    return order, torch.arange(order.shape[1], device=order.device) - starts
