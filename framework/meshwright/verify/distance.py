"""Relative distance of two numbers, and the tolerance of numbers that follow from a rule."""

from __future__ import annotations

import math

RULE_TOLERANCE = 1e-12
"""Allowed relative distance of the learning rate and the loss scale, in every precision: plain Python computes them."""


def relative(found: float, expected: float) -> float:
    """Return |found - expected| / |expected|; NaN, and a number from infinity, are infinitely far."""
    if found == expected:  # also the norms of a step that both skip
        return 0.0
    distance = abs(found - expected) / max(abs(expected), 1e-300)
    return math.inf if math.isnan(distance) else distance


def is_beyond(found: float, expected: float, limit: float) -> bool:
    """Return True if two numbers are farther apart than ``limit`` times the second; NaN always is."""
    return relative(found, expected) > limit
