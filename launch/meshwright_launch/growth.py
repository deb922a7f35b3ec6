"""Growth of a run that has fewer replicas than configured: pauses, and judgement of the last attempt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from meshwright_launch.node_table import Node
from meshwright_launch.replicas import Replicas

MIN_GROW_PAUSE_S = 1.0
"""Shortest pause that is doubled: ``launch.grow_after_s = 0`` would never become longer."""
MAX_GROW_DOUBLINGS = 10
"""Most doublings of the pause before the run grows, one for each time that it has failed to."""


@dataclass
class Growth:
    """Pauses before a run with fewer replicas than configured grows again."""

    pause_s: float
    """``launch.grow_after_s``."""
    changed_s: float = field(default_factory=time.monotonic)
    """Time of the last change of the layout."""
    num_failed: int = 0
    """Times in a row that the larger layout has failed before its first step, or soon after it."""
    grown_s: float | None = None
    """Time of the last growth; None: the larger layout has lasted, or is gone."""
    before: tuple[Replicas, list[Node]] | None = None
    """Layout and nodes to which a growth that fails goes back; None: none is under way."""
    suspects: set[str] = field(default_factory=set)
    """Names of nodes on which a growth has failed: only another one tries them."""

    def give_up(self) -> None:
        """Note that a growth that is under way has failed; no effect if none is."""
        if self.before is not None:
            self.num_failed += 1
        self.before = None

    def is_due(self) -> bool:
        """Return True if the pause is over. Nodes that come and go must not stop the run."""
        pause_s = self._doubled_s() if self.num_failed else self.pause_s
        return time.monotonic() - self.changed_s >= pause_s

    def judge(self, has_shrunk: bool) -> None:
        """Judge the last growth. One that has lasted for a pause ends the row of failures; a shrink
        before that is one more: each counts as one of ``launch.max_restarts``.
        """
        if self.grown_s is None:
            return
        has_lasted = time.monotonic() - self.grown_s >= self._doubled_s()
        if has_lasted:
            self.num_failed = 0
        elif has_shrunk:
            self.num_failed += 1
        if has_lasted or has_shrunk:
            self.grown_s = None

    def _doubled_s(self) -> float:
        doublings = min(self.num_failed, MAX_GROW_DOUBLINGS)
        return max(self.pause_s, MIN_GROW_PAUSE_S) * float(2**doublings)
