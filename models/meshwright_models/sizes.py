"""Checks of the sizes that a builder of models is given."""

from __future__ import annotations

import math

MAX_HEAD_DIM = 2**16
"""Features of a head, far above those of any model: more is a mistyped size,
refused before its weights are made.
"""


def check_positive(**options: float | None) -> None:
    """Raise ValueError for sizes that are not positive, or not finite, all in one message. None:
    not in use.
    """
    wrong = [
        f"{name}={value}"
        for name, value in options.items()
        if value is not None and not 0 < value < math.inf
    ]
    if wrong:
        raise ValueError(f"model options must be positive and finite: {', '.join(wrong)}")


def head_dim_of(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None = None
) -> int:
    """Return ``head_dim``, or hidden_size / num_heads for None.

    Raises:
        ValueError: Heads do not divide the hidden size, or groups the heads (contains the nearest
            valid counts); or a head is too large.
    """
    if head_dim is None and hidden_size % num_heads:
        near = _nearest_divisors(hidden_size, num_heads)
        raise ValueError(
            f"hidden_size={hidden_size} over num_heads={num_heads} heads: use num_heads = {near}"
        )
    if num_heads % num_kv_heads:
        near = _nearest_divisors(num_heads, num_kv_heads)
        raise ValueError(
            f"num_heads={num_heads} over num_kv_heads={num_kv_heads} groups: use num_kv_heads ="
            f" {near}"
        )
    found = hidden_size // num_heads if head_dim is None else head_dim
    if found > MAX_HEAD_DIM:
        raise ValueError(
            f"a head of {found:,} features (head_dim, or hidden_size / num_heads): at most"
            f" {MAX_HEAD_DIM:,}"
        )
    return found


def _nearest_divisors(number: int, near: int) -> str:
    """Return the divisors just below and just above ``near`` as text: "8 or 12"."""
    below = max((i for i in range(1, near) if number % i == 0), default=1)
    above = min((i for i in range(near + 1, number + 1) if number % i == 0), default=number)
    return " or ".join(str(i) for i in sorted({below, above}))
