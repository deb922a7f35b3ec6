"""Scores that count as equal, so that rounding never decides between equal experts or tokens.

Scores that are equal in exact arithmetic come from products of other shapes on each layout, and so
differ in their last bits. The first tokens of the documents of a sample have such scores, a run of
one token at the start of a document, and experts whose rows of the router are equal.

    scores, highest first     0.31   0.24 + 2e-16   0.24   0.24 - 2e-16   0.11        two are chosen
    threshold                        0.24 + 2e-16                                     the last chosen score
    compared as               0.31   threshold      threshold   threshold   0.11      of equal scores the first by place

NOTE [ties at a threshold]: all scores within a tolerance of the threshold, the lowest score that is
chosen, are set to it before they are compared. Scores on a grid would not do: rounding moves equal
scores to both sides of a border of the grid, with odds of noise / grid. The threshold is an order
statistic: noise of at most e in each score moves it by at most e. So equal scores stay together
whatever their value, and rounding decides only if a score lies within 2 e of an edge of the ties,
which is the threshold plus or minus the tolerance. If scores have a density of d in that place, the
odds are 4 e d at the lower edge, and as much at the upper edge where there are ties. Without a
tolerance they are 4 e d too, for a score within 2 e of the threshold. Its width does not enter: it
must exceed the noise, and no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

OF_TOKENS = {
    torch.float64: 2.0**-30,
    torch.float32: 2.0**-14,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-6,
}
"""Relative tolerance between scores of different tokens, by the dtype of their states:
rounding of all layers before.

Measured between equal tokens, of up to 24 layers: 1e-15 in float64, 6e-7 in float32. In 16 bits it
grows with depth, in bfloat16 from 5e-4 in 3 layers to 7e-3 in 8 and 4e-2 in 24: there equal tokens
are not always recognised.
"""
OF_EXPERTS = {torch.float64: 2.0**-30, torch.float32: 2.0**-18}
"""Relative tolerance between scores of one token, by their dtype:
rounding of the router's product alone.
"""


def highest(scores: Tensor, num_chosen: int, offset: Tensor | float = 0.0) -> Tensor:
    """Return the ids (..., num_chosen) of the highest scores (..., n), highest first.

    Of scores that count as equal to the last chosen one, those with the lowest ids are chosen.
    ``offset``: largest magnitude that was added to the scores, whose rounding they have too.
    """
    if num_chosen < scores.shape[-1]:
        threshold, margin = _threshold(scores, num_chosen, offset)
        scores = torch.where((scores - threshold).abs() < margin, threshold, scores)
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :num_chosen]


def choice_gap(scores: Tensor, num_chosen: int, offset: Tensor | float = 0.0) -> Tensor:
    """Return the least change of a score by which :func:`highest` chooses others, ();
    infinity if all are chosen.
    """
    if num_chosen >= scores.shape[-1]:
        return scores.new_full((), torch.inf)
    threshold, margin = _threshold(scores, num_chosen, offset)
    ordered = scores.sort(dim=-1, descending=True).values
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    has_ties = threshold - ordered[..., num_chosen : num_chosen + 1] <= margin
    return distance_to_ties(ordered, ranks, num_chosen, threshold, margin, has_ties).min()


def distance_to_ties(
    scores: Tensor,
    ranks: Tensor,
    num_chosen: int,
    threshold: Tensor,
    margin: Tensor,
    has_ties: Tensor,
) -> Tensor:
    """Return the change of each score that lets it enter or leave the ties of the threshold;
    infinity without effect.

    A score above the ties may enter them without effect, unless one that is not chosen is among
    them (``has_ties``). All arguments broadcast to the shape of ``scores``; ``ranks``: from 0, the
    highest.
    """
    edge = torch.where(ranks < num_chosen, threshold + margin, threshold - margin)
    has_effect = (ranks >= num_chosen) | (has_ties & (ranks < num_chosen - 1))
    return (scores - edge).abs().masked_fill(~has_effect, torch.inf)


def _threshold(scores: Tensor, num_chosen: int, offset: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the lowest chosen score and the distance from it within which scores count as equal,
    both (..., 1).
    """
    threshold = scores.topk(num_chosen, dim=-1).values[..., -1:]
    return threshold, OF_EXPERTS[scores.dtype] * (threshold.abs() + offset)
