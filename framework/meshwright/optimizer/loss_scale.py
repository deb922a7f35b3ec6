"""Loss scale of float16: a factor on the loss in backward,
updated after each step by whether gradients overflowed.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config import LossScaling

MAX_SCALE = 1e36
"""Bound on the scale: scaled losses stay finite in float32."""


class LossScale(NamedTuple):
    """Loss scale of float16, a factor on the loss in backward,
    with the counts that decide its changes.

    It keeps small gradients above float16's smallest number. If it is too large, gradients overflow
    to Inf: all ranks skip the step, since all have the gradient norm, and the scale falls.
    Checkpoints hold it.
    """

    value: float = 1.0
    sound_steps: int = 0
    """Steps without overflow since the last overflow or rise."""
    tolerated: int = 0
    """Overflows left before the scale falls;
    back to ``loss_scale.hysteresis`` when the scale rises.
    """


def first_scale(keys: LossScaling, dtype: str) -> LossScale:
    """Return the loss scale of a run's first step; 1 unless the run computes in float16."""
    if dtype != "float16":
        return LossScale()
    if keys.fixed is not None:
        return LossScale(keys.fixed)
    return LossScale(keys.initial, tolerated=keys.hysteresis)


def can_fall(keys: LossScaling, dtype: str, scale: LossScale) -> bool:
    """Return whether a lower scale is possible,
    so that an overflow at this one may be the scale's fault.
    """
    return dtype == "float16" and keys.fixed is None and scale.value > keys.minimum


def next_scale(keys: LossScaling, dtype: str, scale: LossScale, *, overflow: bool) -> LossScale:
    """Return the loss scale of the next step. ``overflow``:
    the gradients of this one were NaN or Inf.

    The rule is Megatron's and, with a hysteresis of 1, that of torch's GradScaler.
    """
    if dtype != "float16" or keys.fixed is not None:
        return scale
    if overflow:
        tolerated = max(0, scale.tolerated - 1)
        lowered = max(scale.value * keys.backoff, keys.minimum)
        return LossScale(scale.value if tolerated else lowered, tolerated=tolerated)
    if scale.sound_steps + 1 < keys.window:
        return scale._replace(sound_steps=scale.sound_steps + 1)
    grown = scale.value * keys.growth
    value = grown if grown <= MAX_SCALE else scale.value
    return LossScale(value, tolerated=keys.hysteresis)
