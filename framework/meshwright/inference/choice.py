"""Choice of the next token from logits: temperature, the most probable few, nucleus sampling,
and generators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.seeding import derive

GREEDY_BELOW = 1e-30
"""Temperature below which the likeliest token is taken:
logits divided by it would overflow float32.
"""
EQUAL = 2.0**-18
"""Relative distance within which logits count as equal at the last place:
rounding of the head's product in float32.

Tokens whose rows of the head are equal, such as added ones that began at the mean, would otherwise
be chosen by the last bit, which tp and pp change. Of equal ones the lowest id is taken.
"""
MASS_ROUNDING = 1e-6
"""Rounding of a sum of probabilities:
a token at the limit of ``top_p`` up to it is beyond the limit.
"""


class SamplingRequest(NamedTuple):
    """Request: the prompts, and the way to choose a token."""

    prompts: tuple[str, ...]
    num_tokens: int = 100
    temperature: float = 0.8
    """Softmax temperature; 0: greedy decoding."""
    top_k: int = 40
    """Number of most probable tokens to draw from; 0: all."""
    top_p: float = 1.0
    """Probability mass of the most probable tokens to draw from (nucleus sampling)."""
    seed: int | None = None
    """Seed of the draws; None: the run's seed."""


def choose(
    logits: Tensor, request: SamplingRequest, generators: Sequence[torch.Generator]
) -> Tensor:
    """Choose a token per row: (B, V) logits -> (B,) int64 on CPU,
    each row with its own generator.
    """
    logits = logits.float().cpu()
    if request.temperature < GREEDY_BELOW:
        return torch.cat([highest(row, 1) for row in logits])
    count = min(request.top_k or logits.shape[-1], logits.shape[-1])
    return torch.cat(
        [
            _draw(row, count, request, generator)
            for row, generator in zip(logits, generators, strict=True)
        ]
    )


def _draw(
    logits: Tensor, count: int, request: SamplingRequest, generator: torch.Generator
) -> Tensor:
    """Draw one of the ``count`` likeliest tokens that have the probability ``top_p`` together. (V,)
    -> (1,).
    """
    tokens = highest(logits, count)  # likeliest first
    shares = torch.softmax(logits[tokens] / request.temperature, dim=-1)
    before = shares.cumsum(-1) - shares
    before[0] = -1.0  # the likeliest token is always kept
    is_kept = before < request.top_p - MASS_ROUNDING
    shares = shares.masked_fill(~is_kept, 0.0)
    num_kept = int(is_kept.sum())
    if num_kept < count:
        tokens = highest(logits, num_kept)
    return tokens[torch.multinomial(shares, 1, generator=generator)]


def highest(logits: Tensor, count: int) -> Tensor:
    """Return the ids (count,) of the highest logits (V,), highest first.

    Of those that count as equal to the last one, the lowest ids are taken.
    """
    last = logits.topk(count).values[-1]
    tied = torch.where((logits - last).abs() < EQUAL * last.abs(), last, logits)
    found = (tied >= last).nonzero().flatten()
    return found[tied[found].argsort(descending=True, stable=True)[:count]]


def make_generators(request: SamplingRequest, seed: int) -> list[torch.Generator]:
    """Return a generator per prompt: a text is independent of other prompts,
    and a repeated prompt draws anew.
    """
    chosen = seed if request.seed is None else request.seed
    generators = []
    for index, prompt in enumerate(request.prompts):
        again = request.prompts[:index].count(prompt)
        key = derive(chosen, "sample", prompt, again) if again else derive(chosen, "sample", prompt)
        generators.append(torch.Generator().manual_seed(key))
    return generators
