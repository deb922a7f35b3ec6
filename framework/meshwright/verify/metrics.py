"""Comparison of the metrics that layers and the loss record (``meshwright.record``)
with those of the plain run.
"""

from __future__ import annotations

import math

from meshwright.verify.reference import RunNumbers, validated_after


def passes_of(steps: int) -> list[str]:
    """Return the names of the training steps and validation passes,
    in the order of ``RunNumbers.tokens``.
    """
    names = []
    for step in range(1, steps + 1):
        names.append(f"step {step}")
        if step in validated_after(steps):
            names.append(f"validation after step {step}")
    return names


def compare_metrics(found: RunNumbers, expected: RunNumbers, tolerance: float) -> list[str]:
    """Describe the first recorded metric of a step or validation that differs by more
    than the relative tolerance.
    """
    for when, ours, theirs in zip(
        passes_of(len(expected.losses)), found.metrics, expected.metrics, strict=True
    ):
        for name in sorted(ours.keys() | theirs.keys()):
            mine, reference = ours.get(name, math.nan), theirs.get(name, math.nan)
            if not abs(mine - reference) <= tolerance * max(abs(reference), 1e-6):
                return [
                    f"the recorded metric {name} of {when} is {mine!r}, the reference's"
                    f" {reference!r}"
                ]
    return []
