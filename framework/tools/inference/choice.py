"""Choice of the next token from logits: temperature, the most probable few, nucleus sampling, and generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.seeding import derive

GREEDY_BELOW = 1e-30
"""Temperature below which the likeliest token is taken: logits divided by it would overflow float32."""


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


def choose(logits: Tensor, request: SamplingRequest, generators: Sequence[torch.Generator]) -> Tensor:
    """Choose a token per row: (B, V) logits -> (B,) int64 on CPU, each row with its own generator."""
    logits = logits.float().cpu()
    if request.temperature < GREEDY_BELOW:
        return logits.argmax(-1)
    count = min(request.top_k or logits.shape[-1], logits.shape[-1])
    values, tokens = logits.topk(count)  # likeliest first
    shares = torch.softmax(values / request.temperature, dim=-1)
    before = shares.cumsum(-1) - shares
    before[:, 0] = -1.0  # the likeliest token is always kept
    shares = shares.masked_fill(before >= request.top_p, 0.0)
    picked = [torch.multinomial(row, 1, generator=generator) for row, generator in zip(shares, generators, strict=True)]
    return tokens.gather(-1, torch.stack(picked))[:, 0]


def make_generators(request: SamplingRequest, seed: int) -> list[torch.Generator]:
    """Return a generator per prompt: a text is independent of other prompts, and a repeated prompt draws anew."""
    chosen = seed if request.seed is None else request.seed
    generators = []
    for index, prompt in enumerate(request.prompts):
        again = request.prompts[:index].count(prompt)
        key = derive(chosen, "sample", prompt, again) if again else derive(chosen, "sample", prompt)
        generators.append(torch.Generator().manual_seed(key))
    return generators
