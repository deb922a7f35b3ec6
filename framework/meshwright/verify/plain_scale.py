"""Loss scale of the plain run in float16: the rule of Megatron-LM,
with a hysteresis of 1 that of torch's GradScaler.

Written without :mod:`meshwright.optimizer.loss_scale`, so that a mistake there is a difference.
"""

from __future__ import annotations

from meshwright.config import LossScaling


class PlainScale:
    """Dynamic loss scale: falls after ``hysteresis`` overflows,
    rises after ``window`` steps without one.
    """

    def __init__(self, keys: LossScaling) -> None:
        self.keys = keys
        self.value = keys.initial if keys.fixed is None else keys.fixed
        self._growth_tracker, self._hysteresis_tracker = 0, keys.hysteresis

    def update(self, *, found_inf: bool) -> None:
        """Update the scale after a step; ``found_inf``: its gradients had NaN or Inf."""
        if self.keys.fixed is not None:
            return
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.value = max(self.value * self.keys.backoff, self.keys.minimum)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.keys.window:
            self._growth_tracker, self._hysteresis_tracker = 0, self.keys.hysteresis
            self.value *= self.keys.growth
