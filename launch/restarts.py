"""Restarts of a failed run from its newest checkpoint, as long as the run makes progress.

    start -- rank 1 was ended by SIGKILL --> going on from step 160, restart 1 of 5
      |                                        newer checkpoints: as often as launch.max_restarts allows
      |                                        none, three restarts in a row: given up, exit code 93
      |-- would fail again: exit code 2, 17, ... -------> as it is
      |-- asked to end, or done ------------------------> as it is

Every failure is appended, whole, to ``runs/NAME/logs/failures.log``.
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
"""Number of restarts in a row without a newer checkpoint after which a run is given up."""


def is_transient(failure: RankFailed) -> bool:
    """Return True if a restart may get past the failure: a rank died, lost a peer, or raised an unexpected error.

    A hang and replicas that drifted apart may pass too. An error that the user must fix and a NaN/Inf would recur. A
    run that was asked to end is not restarted.
    """
    return failure.exit_code in MAY_PASS and not failure.asked


class LastCheckpoint(NamedTuple):
    """Progress of a run: the last checkpoint that it has written."""

    written_ns: int
    """Time at which the checkpoint was written; 0 if there is none."""
    step: int


def find_stop_reason(reached: Sequence[LastCheckpoint], most: int) -> str | None:
    """Return the reason not to restart the run, or None.

    ``reached``: the last written checkpoint at the start of the run and after each of its failures.
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


def find_last_checkpoint(directory: Path) -> LastCheckpoint:
    """Return the checkpoint that was written last. One of a higher step may be damaged, from before the last resume."""
    from meshwright.checkpoint import find

    found = [LastCheckpoint(0, 0)]
    for candidate in find(directory):
        with contextlib.suppress(OSError):
            found.append(LastCheckpoint(candidate.path.stat().st_mtime_ns, candidate.step))
    return max(found)


def run_with_restarts(start: Callable[[], None], most: int, directory: Path, say: Callable[[str], object]) -> None:
    """Call ``start()``, and again after each failure that may pass, at most ``most`` times. ``directory``: the run's.

    Raises:
        RankFailed: a failure that would recur; with exit code 93 if the run was given up.
    """
    if most == 0:
        start()
        return
    reached = [find_last_checkpoint(directory)]
    while True:
        try:
            start()
            return
        except RankFailed as failure:
            if not is_transient(failure):
                raise
            _write_down(failure, directory)
            reached.append(find_last_checkpoint(directory))
            reason = find_stop_reason(reached, most)
            if reason is not None:
                count = len(reached) - 1
                times = f"{count} failure{'s' * (count > 1)}"
                raise RankFailed(
                    f"given up after {times}: {reason}. The last failure:\n{failure}", failure.rank, GIVEN_UP
                ) from None
            said = str(failure).splitlines()[0]
        say(f"{said}; going on from step {reached[-1].step}, restart {len(reached) - 1} of {most}")


def _write_down(failure: RankFailed, directory: Path) -> None:
    """Append the whole failure to a log file, because the message of a restart has only its first line."""
    with contextlib.suppress(OSError), (directory / "logs" / "failures.log").open("a") as log:
        log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n{failure}\n")
