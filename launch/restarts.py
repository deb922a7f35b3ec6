"""A run that failed, started again from its newest checkpoint, as long as that gets anywhere.

    start -- rank 1 was ended by SIGKILL --> going on from step 160, restart 1 of 5
      |                                        newer checkpoints: as often as launch.max_restarts allows
      |                                        none, three restarts in a row: given up, exit code 93
      |-- what would come again: exit code 2, 17, ... --> as it is
      |-- asked to end, or done ------------------------> as it is

Every failure is written, whole, to ``runs/NAME/logs/failures.log``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import HangError
from meshwright.launch.failure import RankFailed

GIVEN_UP = 93
MAY_PASS = (1, 18, HangError.exit_code)
IN_VAIN = 3
"""So many restarts in a row without a newer checkpoint are enough."""


def may_pass(failure: RankFailed) -> bool:
    """Whether the run may get past it when it starts again: a rank died, lost a peer, or raised what nobody foresaw.

    So it may when it hung, or when its copies of a weight had drifted apart. What a user must mend, or a number that is
    none, would come again. Who was asked to end ends.
    """
    return failure.exit_code in MAY_PASS and not failure.asked


class Reached(NamedTuple):
    """How far a run has got."""

    written_ns: int
    """When its last checkpoint was written; 0: there is none."""
    step: int


def why_stop(reached: Sequence[Reached], most: int) -> str | None:
    """Why the run is not started again; None when it is.

    ``reached``: the checkpoint that was written last, when the run was started and after each of its failures.
    """
    num_failures = len(reached) - 1
    num_restarts = num_failures - 1
    in_vain = 0
    while in_vain < num_restarts and reached[-1 - in_vain] <= reached[-2 - in_vain]:
        in_vain += 1
    if in_vain >= IN_VAIN:
        return f"{in_vain} restarts in a row never got past step {reached[-1].step}"
    if num_restarts >= most:
        return f"launch.max_restarts = {most} is used up, at step {reached[-1].step}"
    return None


def last_written(directory: Path) -> Reached:
    """Of a run: not that of the highest step, which may be a damaged one that the run has gone back behind."""
    from meshwright.checkpoint import find

    found = [Reached(0, 0)]
    for candidate in find(directory):
        with contextlib.suppress(OSError):
            found.append(Reached(candidate.path.stat().st_mtime_ns, candidate.step))
    return max(found)


def keep_going(start: Callable[[], None], most: int, directory: Path, say: Callable[[str], object]) -> None:
    """``start()``, and again when it fails, at most ``most`` times. ``directory``: the run's.

    Raises:
        RankFailed: what cannot pass; with exit code 93 when it was given up.
    """
    if most == 0:
        start()
        return
    reached = [last_written(directory)]
    while True:
        try:
            start()
            return
        except RankFailed as failure:
            if not may_pass(failure):
                raise
            _write_down(failure, directory)
            reached.append(last_written(directory))
            reason = why_stop(reached, most)
            if reason is not None:
                count = len(reached) - 1
                times = f"{count} failure{'s' * (count > 1)}"
                raise RankFailed(
                    f"given up after {times}: {reason}. The last failure:\n{failure}", failure.rank, GIVEN_UP
                ) from None
            said = str(failure).splitlines()[0]
        say(f"{said}; going on from step {reached[-1].step}, restart {len(reached) - 1} of {most}")


def _write_down(failure: RankFailed, directory: Path) -> None:
    """For who looks for what the one line of a restart leaves out."""
    with contextlib.suppress(OSError), (directory / "logs" / "failures.log").open("a") as log:
        log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n{failure}\n")
