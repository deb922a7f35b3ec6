"""Protocol of observers, callbacks of the training loop between steps, and :class:`StepEvent`,
their view of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.parts.rank import Parts, StepStats


class StragglerShare(NamedTuple):
    """A rank, a link or a gradient reduction that the other ranks wait for."""

    name: str
    """Such as "rank 5 on h2"; empty: nothing delays the others for long enough."""
    rank: int
    share: float
    """Share of the step for which the others wait."""


@dataclass
class StepEvent:
    """One step, as observers see it. An observer may fill a field for the observers after it."""

    stats: StepStats
    step_s: float
    is_first: bool
    """The first step since this start of the run."""
    is_last: bool
    is_stopping: bool
    """True if the run ends after this step, because some rank was asked to stop."""
    is_saving: bool
    """True if a checkpoint of this step is due."""
    save_s: float | None = None
    """Seconds of the checkpoint that was completed since the step before; None: none was."""
    recoveries: int | None = None
    """Recoveries in place so far; None: none was completed since the step before."""
    recovery_s: float | None = None
    """Seconds of the last one."""
    straggler: StragglerShare | None = None
    """Largest delay of the step; None: not measured in this step, or not on this rank."""
    validation_loss: float | None = None
    validation_s: float | None = None
    """Seconds of the validation; None: there was none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """More metrics of the step, by name: a callback adds its own, and rank 0 records them."""


class Observer:
    """Callbacks of the training loop, all of them empty here.

    Every rank has the same observers in the same order, so each may run collectives.
    """

    def setup(self, parts: Parts) -> None:
        """Run once, when the parts are built and before a checkpoint is loaded;
        add states here (``add_state``).
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state to save with each checkpoint: plain JSON, the same on every rank.
        Called after each step.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state, after a checkpoint that has one was loaded."""

    def before_step(self, parts: Parts) -> None:
        """Run before each step."""

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Run after each step; raise to end the run. Weights may be in an all-gather:
        see ``wait_for_weights``.
        """

    def after_training(self, parts: Parts) -> None:
        """Run once, after the last step and the last ``after_step``."""

    def on_error(self, parts: Parts, error: Exception) -> None:
        """Run when an error ends training, perhaps on this rank alone:
        communicate only if all ranks raise it.
        """
