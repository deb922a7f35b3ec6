"""Capacity of experts: the most tokens of one sample that an expert takes,
and the choice of these tokens.

    capacity C = ceil(factor x k S / E)     an expert takes C of the k S choices of a sample; a factor of 1: even load
    priority   (score, place)               the highest score of the router first; of equal ones the earlier token

Scores within a relative tolerance of the C-th highest of an expert count as equal to it. Otherwise
rounding would drop one or the other of two tokens with the same state: NOTE [ties at a threshold]
in equal_scores.py.

The rule is that of one sample: it does not depend on the other samples of a micro-batch, and ranks
with parts of a sample gather its choices. It drops tokens in training alone, as DeepSeek-V2 does
(arXiv:2405.04434, section 2.2.4): a later token decides whether an earlier one is dropped, which no
generation could repeat.

Shapes: B samples, S tokens, E experts, k experts of a token, R = S k choices of a sample, C
capacity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright_models.equal_scores import distance_to_ties
from meshwright_models.expert_balance import count_tokens


def capacity_of(factor: float, top_k: int, num_tokens: int, num_experts: int) -> int:
    """Return the capacity: the most tokens of a sample that an expert takes, at least 1."""
    return max(1, math.ceil(factor * top_k * num_tokens / num_experts))


def within_capacity(
    ids: Tensor, scores: Tensor, num_experts: int, capacity: int, tolerance: float
) -> Tensor:
    """Return the mask of the choices within capacity, (B, S, k) bool. ids: (B, S, k) int64; scores:
    (B, S, k) of ids.

    S must be all tokens of the samples, in their order. ``tolerance``: relative, of scores that
    count as equal.
    """
    chosen, flat = ids.flatten(1), scores.flatten(1)
    _, starts, threshold, _ = _thresholds(chosen, flat, num_experts, capacity)
    threshold, margin = threshold.gather(1, chosen), tolerance * threshold.abs().gather(1, chosen)
    # 0 above the ties of the threshold, 1 in them, 2 below: the place decides among the ties alone
    level = (flat <= threshold + margin).to(torch.int64) + (flat < threshold - margin)
    order = (3 * chosen + level).argsort(dim=1, stable=True)
    return (
        torch.empty_like(order).scatter_(1, order, _ranks(order, chosen, starts)).view_as(ids)
        < capacity
    )


def capacity_gap(
    ids: Tensor, scores: Tensor, num_experts: int, capacity: int, tolerance: float
) -> Tensor:
    """Return the least change of a score by which an expert takes other tokens, ();
    infinity if none is at capacity.

    Arguments are those of :func:`within_capacity`.
    """
    chosen, flat = ids.flatten(1), scores.flatten(1)
    order, starts, threshold, following = _thresholds(chosen, flat, num_experts, capacity)
    margin = tolerance * threshold.abs()
    has_ties = threshold - following <= margin
    experts = chosen.gather(1, order)
    of_choices = (each.gather(1, experts) for each in (threshold, margin, has_ties))
    gaps = distance_to_ties(
        flat.gather(1, order), _ranks(order, chosen, starts), capacity, *of_choices
    )
    return gaps.min() if gaps.numel() else scores.new_full((), torch.inf)


def _thresholds(
    chosen: Tensor, scores: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, ...]:
    """Return the order of the choices by expert, then by score, (B, R),
    and three facts of each expert, (B, E).

    They are its first index in that order, its lowest score within capacity, and the score that
    follows, -inf if none does. An expert without a choice has any threshold. chosen: (B, R) int64;
    scores: (B, R).
    """
    by_score = scores.argsort(dim=1, descending=True, stable=True)
    order = by_score.gather(1, chosen.gather(1, by_score).argsort(dim=1, stable=True))
    ordered, counts = scores.gather(1, order), count_tokens(chosen, num_experts)
    starts = counts.cumsum(1) - counts
    threshold = ordered.gather(1, (starts + counts.clamp(max=capacity) - 1).clamp(min=0))
    following = ordered.gather(1, (starts + capacity).clamp(max=ordered.shape[1] - 1))
    return order, starts, threshold, following.masked_fill(counts <= capacity, -torch.inf)


def _ranks(order: Tensor, chosen: Tensor, starts: Tensor) -> Tensor:
    """Return the rank within its expert of each choice of an order by expert, (B, R)."""
    return torch.arange(order.shape[1], device=order.device) - starts.gather(
        1, chosen.gather(1, order)
    )
