"""Loss scale of float16: a factor on the loss in backward, updated after each step by whether gradients overflowed."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config import RunConfig

MAX_SCALE = 1e36
"""Bound on the scale: scaled losses stay finite in float32."""


class LossScale(NamedTuple):
    """Loss scale of float16, a factor on the loss in backward, with the counts that decide its changes.

    It keeps small gradients above float16's smallest number. If it is too large, gradients overflow to Inf: all ranks
    skip the step, since all have the gradient norm, and the scale falls. Checkpoints hold it.
    """

    value: float = 1.0
    sound_steps: int = 0
    """Steps without overflow since the last overflow or rise."""
    tolerated: int = 0
    """Overflows left before the scale falls; back to ``loss_scale.hysteresis`` when the scale rises."""


def first_scale(config: RunConfig) -> LossScale:
    """Return the loss scale of a run's first step; 1 unless the run computes in float16."""
    keys = config.loss_scale
    if config.train.dtype != "float16":
        return LossScale()
    return LossScale(keys.initial, 0, keys.hysteresis) if keys.fixed is None else LossScale(keys.fixed)


def can_fall(config: RunConfig, scale: LossScale) -> bool:
    """Return whether a lower scale is possible, so that an overflow at this one may be the scale's fault."""
    keys = config.loss_scale
    return config.train.dtype == "float16" and keys.fixed is None and scale.value > keys.minimum


def next_scale(config: RunConfig, scale: LossScale, *, overflow: bool) -> LossScale:
    """Return the loss scale of the next step. ``overflow``: the gradients of this one were NaN or Inf.

    The rule is Megatron's and, with a hysteresis of 1, that of torch's GradScaler.
    """
    keys = config.loss_scale
    if config.train.dtype != "float16" or keys.fixed is not None:
        return scale
    value, sound_steps, tolerated = scale
    if overflow:
        tolerated = max(0, tolerated - 1)
        return LossScale(value if tolerated else max(value * keys.backoff, keys.minimum), 0, tolerated)
    if sound_steps + 1 < keys.window:
        return LossScale(value, sound_steps + 1, tolerated)
    grown = value * keys.growth
    return LossScale(grown if grown <= MAX_SCALE else value, 0, keys.hysteresis)
