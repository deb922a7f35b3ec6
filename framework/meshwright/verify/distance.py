"""Comparison of two numbers, of numbers by step, and of two tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

RULE_TOLERANCE = 1e-12
"""Allowed relative distance of the learning rate and the loss scale, in every precision:
plain Python computes them.
"""


def relative(found: float, expected: float) -> float:
    """Return |found - expected| / |expected|; NaN, and a number from infinity,
    are infinitely far.
    """
    if found == expected:  # also the norms of a step that both skip
        return 0.0
    distance = abs(found - expected) / max(abs(expected), 1e-300)
    return math.inf if math.isnan(distance) else distance


def is_beyond(found: float, expected: float, limit: float) -> bool:
    """Return True if two numbers are farther apart than ``limit`` times the second;
    NaN always is.
    """
    return relative(found, expected) > limit


def first_beyond(
    what: str,
    steps: Sequence[int],
    found: Sequence[float],
    expected: Sequence[float],
    first: float,
    later: float,
) -> list[str]:
    """Describe the first number that exceeds its tolerance: ``first`` in step 1,
    ``later`` in all other steps.
    """
    for step, ours, theirs in zip(steps, found, expected, strict=True):
        limit, distance = first if step == 1 else later, relative(ours, theirs)
        if not distance <= limit:
            return [
                f"{what} {step} is {ours!r}, the reference's {theirs!r}: {distance:.1e} apart,"
                f" tolerance {limit:.0e}"
            ]
    return []


def is_equal(found: Tensor | None, expected: Tensor) -> bool:
    """Return whether a tensor is there, and equal to another one."""
    return found is not None and found.shape == expected.shape and torch.equal(found, expected)


def constant_factor(found: Tensor, expected: Tensor) -> float | None:
    """Return the factor between two float64 tensors of one shape; None if it is not constant."""
    ours, theirs = found.flatten(), expected.flatten()
    factor = float(torch.dot(ours, theirs) / torch.dot(theirs, theirs).clamp_min(1e-300))
    is_constant = float((ours - factor * theirs).norm()) < 1e-6 * float(theirs.norm())
    return factor if is_constant else None
