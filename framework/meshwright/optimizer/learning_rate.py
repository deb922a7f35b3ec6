"""Learning rate as a pure function of the step: no scheduler state to save,
no off-by-one error after a resume.
"""

from __future__ import annotations

import math

from meshwright.config import Optimizer
from meshwright.optimizer.own import own_rate
from meshwright.optimizer.own_defaults import peak_rate

DEFAULT_FLOOR = 0.1
"""Share of the peak that an unset ``min_learning_rate`` is:
at 0 the last step would change no weight.
"""


def learning_rate(optimizer: Optimizer, step: int, num_steps: int) -> float:
    """Return the learning rate of step ``step`` (0-based: the first step of a run is 0)
    of ``num_steps``.

    Warmup is linear and never zero: step 0 of ``warmup_steps`` w uses 1/w of the peak, step w-1 the
    full peak.

        cosine    peak -> min over the steps after warmup, half a cosine; the last step of the run is at min
        linear    the same, linearly
        wsd       peak until the last ``decay_steps``, then linearly to min (warmup, stable, decay)
        constant  peak

    With ``decay_until`` = n the decay is that of a run of n steps; from step n-1 on the rate is at
    min. A function of the user, ``package.module:function``, returns the factor on the peak for
    every step.

    Raises:
        ConfigError: the user's function fails or returns no finite factor.
    """
    if ":" in optimizer.schedule:
        return own_rate(optimizer, step, num_steps)
    peak = peak_rate(optimizer)
    low = optimizer.min_learning_rate
    if low is None:
        low = DEFAULT_FLOOR * peak
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
