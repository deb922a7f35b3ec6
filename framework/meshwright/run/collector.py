"""Python's garbage collector, run between steps and on all ranks in the same ones.

Left alone, each rank's collector starts after so many allocations, at its own moment inside of a
step, and all others wait for that rank. A full collection visits every object of Python's modules,
of torch and of the model.
"""

from __future__ import annotations

import gc


class StepCollector:
    """Context of a training loop. Collects after the first step and then every ``every`` steps,
    and never otherwise.

    What exists after the first step is frozen: later collections skip it. A process that has frozen
    objects before keeps its own choice, because unfreezing is all or nothing. On exit the collector
    is as it was before.
    """

    def __init__(self, every: int) -> None:
        """Prepare to control this process. ``every``: steps between collections; 0:
        leave it to Python.
        """
        self._every = every
        self._steps = 0
        self._was_enabled, self._has_frozen = gc.isenabled(), False

    def __enter__(self) -> StepCollector:
        return self

    def __exit__(self, *error: object) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self) -> None:
        """Count a step, and collect if it is due. Blocks for milliseconds; no communication."""
        if self._every == 0:
            return
        if self._steps % self._every == 0:
            gc.collect()
        if self._steps == 0:
            gc.disable()
            if gc.get_freeze_count() == 0:
                gc.freeze()
                self._has_frozen = True
        self._steps += 1
