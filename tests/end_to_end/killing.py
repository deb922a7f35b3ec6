"""Callbacks that kill their rank once, at moments between steps, for the tests of recoveries.

The environment variable KILLED_ONCE names a file that does not exist before.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from meshwright.parts import Observer, Parts, StepEvent

VARIABLE = "KILLED_ONCE"
PHASE = "KILLED_IN"
"""Environment variable with the phase of a mirror in which :class:`InTheMirror` kills its rank."""


def kill_once(suffix: str = "") -> None:
    """Kill this process, unless some process was killed before."""
    fired = Path(os.environ[VARIABLE] + suffix)
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


class AfterSteps(Observer):
    """Kills a rank after each of the steps in KILLED_AFTER, before it is mirrored."""

    def __init__(self, parts: Parts) -> None:
        """Take the parts of a rank."""

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Kill the rank of the step's number."""
        step = parts.state.step
        if str(step) in os.environ["KILLED_AFTER"].split() and parts.mesh.rank == step % 4:
            kill_once(f"-{step}")


class SlowMirrors(AfterSteps):
    """Makes every mirror slow, and kills ranks as its base does."""

    def __init__(self, parts: Parts) -> None:
        """Put a pause in front of the copy."""
        from meshwright.checkpoint import memory

        copy = memory._copy

        def copy_slowly(pieces: Any, targets: Any) -> None:
            time.sleep(0.3)
            copy(pieces, targets)

        memory._copy = copy_slowly


class WritesBeforeSteps(SlowMirrors):
    """Changes weights before each step, as a callback may."""

    def before_step(self, parts: Parts) -> None:
        """Change this rank's shards."""
        for shard in parts.optimizer.shards:
            shard.weights.mul_(1.001)


class InTheMirror(Observer):
    """Kills rank 1 in a phase of the mirror of step 3, on its thread."""

    def __init__(self, parts: Parts) -> None:
        """Take the parts of a rank."""

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Put the trap into the mirror of step 3."""
        if parts.state.step == 3 and parts.mesh.rank == 1:
            _trap(os.environ[PHASE])


def _trap(phase: str) -> None:
    """Kill this process when its mirror comes to a phase."""
    from meshwright.checkpoint import memory
    from meshwright.run.mirror_exchange import MirrorExchange

    if phase == "half of its boxes are copied":
        copy = memory._copy

        def copy_half(pieces: Any, targets: Any) -> None:
            half = len(pieces) // 2
            num_boxes = sum(len(list(each.boxes())) for each in pieces[:half] if each.num_bytes)
            copy(pieces[:half], targets[:num_boxes])
            kill_once()
            copy(pieces, targets)

        memory._copy = copy_half
    elif phase == "its copy is not complete":
        complete = memory.MirrorCopy.complete

        def killed(self: Any, slot: str, mark: str) -> None:
            kill_once()
            complete(self, slot, mark)

        memory.MirrorCopy.complete = killed  # type: ignore[method-assign]
    else:
        run, receive = MirrorExchange.run, MirrorExchange._receive

        def run_killed(self: Any, own: Any) -> None:
            if phase == "its own is complete":
                kill_once()
            run(self, own)
            if phase == "all is complete":
                kill_once()

        def receive_killed(self: Any, tensors: Any, peer: int, what: str) -> None:
            if phase == f"it waits for {what}":
                kill_once()
            receive(self, tensors, peer, what)

        MirrorExchange.run = run_killed  # type: ignore[method-assign]
        MirrorExchange._receive = receive_killed  # type: ignore[method-assign]


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
