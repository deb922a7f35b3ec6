"""Learning rate and loss scale of a step.

The learning rate is a pure function of the step: nothing to save, nothing to be off by one after a resume. The loss
scale follows from the overflows so far.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.config import Optimizer, RunConfig
from meshwright.optimizer.own import own_rate


def learning_rate(optimizer: Optimizer, step: int, num_steps: int) -> float:
    """Return the learning rate of step ``step`` (0-based: the first step of a run is 0) of ``num_steps``.

    Warmup is linear and never zero: step 0 of ``warmup_steps`` w uses 1/w of the peak, step w-1 the full peak.

        cosine    peak -> min over the steps after warmup, half a cosine; the last step of the run is at min
        linear    the same along a line
        wsd       peak until the last ``decay_steps``, then a line to min (warmup, stable, decay)
        constant  peak

    With ``decay_until`` = n the decay is that of a run of n steps; from step n-1 on the rate is at min. A function of
    the user, ``package.module:function``, returns the factor on the peak for every step.

    Raises:
        ConfigError: the user's function fails or returns no finite factor.
    """
    if ":" in optimizer.schedule:
        return own_rate(optimizer, step, num_steps)
    peak, low = optimizer.learning_rate, optimizer.min_learning_rate
    warmup = optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    end = optimizer.decay_until or num_steps
    start = end - optimizer.decay_steps if optimizer.schedule == "wsd" else warmup
    if step < start:
        return peak
    share = min(1.0, (step - start + 1) / max(1, end - start))
    if optimizer.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * share))
    return peak + (low - peak) * share


MAX_SCALE = 1e36
"""Bound on the scale: scaled losses stay finite in float32."""


class LossScale(NamedTuple):
    """Loss scale of float16, a factor on the loss in backward, with the counts that decide its changes.

    It keeps small gradients above float16's smallest number. Too large a scale makes gradients Inf: all ranks skip the
    step, since all have the gradient norm, and the scale falls. It is part of a run's state.
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
    """Return whether an overflow at this scale is one that a smaller scale may avoid."""
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
