"""Callbacks that kill their rank once, at moments between steps, for the tests of recoveries.

The environment variable KILLED_ONCE names a file that does not exist before.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.util import Finalize
from pathlib import Path

from meshwright.parts import Observer, Parts, StepEvent

VARIABLE = "KILLED_ONCE"


def kill_once() -> None:
    """Kill this process, unless some process was killed before."""
    fired = Path(os.environ[VARIABLE])
    if not fired.exists():
        fired.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class AfterTraining(Observer):
    """Kills rank 1 after the last step, whose checkpoint is published."""

    def __init__(self, parts: Parts) -> None:
        """Take the parts of a rank."""

    def after_training(self, parts: Parts) -> None:
        """Kill rank 1."""
        if parts.mesh.rank == 1:
            kill_once()


class BeforeTheMirror(Observer):
    """Kills rank 1 after step 3 is saved, before it is mirrored."""

    def __init__(self, parts: Parts) -> None:
        """Take the parts of a rank."""
        self.writes = False

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Put the trap in front of the mirror of step 3."""
        if parts.state.step == 3 and parts.mesh.rank == 1:
            from meshwright.checkpoint.memory import MirrorWriter

            write = MirrorWriter.write

            def killed(self: MirrorWriter, *what: object, **how: object) -> None:
                kill_once()
                write(self, *what, **how)  # type: ignore[arg-type]

            MirrorWriter.write = killed  # type: ignore[method-assign]


class AtExit(Observer):
    """Kills rank 1 when its process ends, after the last barrier."""

    def __init__(self, parts: Parts) -> None:
        """Take the parts of a rank."""
        if parts.mesh.rank == 1:
            Finalize(None, kill_once, exitpriority=0)


class FailsAtTheEnd(Observer):
    """Raises after the last step, always."""

    def __init__(self, parts: Parts) -> None:
        """Take the parts of a rank."""

    def after_training(self, parts: Parts) -> None:
        """Raise on rank 0."""
        if parts.mesh.rank == 0:
            raise ArithmeticError("the secret cause")
