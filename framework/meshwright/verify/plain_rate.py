"""Learning rate of the plain run, from the definition in docs/optimizers.md.

Written without :mod:`meshwright.optimizer.learning_rate`, so that a mistake there is a difference.
t = 1 .. n are the steps, w the warm-up; the decay lasts from after step b to step e:

    t <= w        peak t / w
    w < t <= b    peak
    b < t < e     low + (peak - low) s(x)    with x = (t - b) / (e - b)
    e <= t        low

    cosine: s(x) = cos^2(pi x / 2), linear and wsd: s(x) = 1 - x
"""

from __future__ import annotations

import math

from meshwright.config import Optimizer
from meshwright.config.functions import find_function
from meshwright.errors import ConfigError
from meshwright.optimizer import peak_rate


def plain_rate(optimizer: Optimizer, t: int, num_steps: int) -> float:
    """Return the learning rate of step ``t``, counted from 1, in a run of ``num_steps`` steps."""
    peak = peak_rate(optimizer)
    low = peak / 10 if optimizer.min_learning_rate is None else optimizer.min_learning_rate
    if ":" in optimizer.schedule:
        return peak * float(
            find_function(optimizer.schedule, "optimizer.schedule", "a function", ConfigError)(
                t - 1, num_steps
            )
        )
    if t <= optimizer.warmup_steps:
        return peak * t / optimizer.warmup_steps
    end = optimizer.decay_until or num_steps
    begin = end - optimizer.decay_steps if optimizer.schedule == "wsd" else optimizer.warmup_steps
    if optimizer.schedule == "constant" or t <= begin:
        return peak
    if t >= end:
        return low
    x = (t - begin) / (end - begin)
    share = math.cos(math.pi * x / 2) ** 2 if optimizer.schedule == "cosine" else 1 - x
    return low + (peak - low) * share
