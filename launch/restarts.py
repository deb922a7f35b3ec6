"""Restarts of a failed run from its newest checkpoint, as long as the run makes progress.

    start -- rank 1 was ended by SIGKILL --> resuming from step 160, restart 1 of 5
      |                                        with newer checkpoints: as often as launch.max_restarts allows
      |                                        none in three restarts in a row: given up, exit code 93
      |-- would recur: exit code 2, 17, ... ------------> no restart
      |-- ended on request, or done --------------------> no restart

The whole message of every failure is appended to ``runs/NAME/logs/failures.log``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import HangError, NonFiniteError, UserError
from meshwright.launch.failure import RankFailed

GIVEN_UP_EXIT_CODE = 93
RECURRING_EXIT_CODES = (UserError.exit_code, NonFiniteError.exit_code)
"""Exit codes of failures that a restart by a cluster's scheduler cannot get past."""
TRANSIENT_EXIT_CODES = (1, 18, HangError.exit_code)
"""Exit codes of failures that a restart on this machine may get past; 18: drifted replicas (DriftError)."""
MAX_FUTILE_RESTARTS = 3
"""Number of restarts in a row without a newer checkpoint after which a run is given up."""


def is_transient(failure: RankFailed) -> bool:
    """Return True if a restart may get past the failure: a rank died, lost a peer, or raised an unexpected error.

    A hang and drifted replicas are also transient. A user's error and a NaN/Inf would recur. A run that was already
    ending after a signal is not restarted.
    """
    return failure.exit_code in TRANSIENT_EXIT_CODES and not failure.is_requested


class LastCheckpoint(NamedTuple):
    """Progress of a run: the last checkpoint that it has written."""

    written_ns: int
    """Time at which the checkpoint was written; 0 if there is none."""
    step: int


def find_stop_reason(reached: Sequence[LastCheckpoint], most: int) -> str | None:
    """Return the reason not to restart the run, or None.

    ``reached``: the last written checkpoint at the start of the run and after each of its failures.
    """
    num_restarts = len(reached) - 2
    futile = 0
    while futile < num_restarts and reached[-1 - futile] <= reached[-2 - futile]:
        futile += 1
    if futile >= MAX_FUTILE_RESTARTS:
        return f"{futile} restarts in a row never got past step {reached[-1].step}"
    if num_restarts >= most:
        return f"launch.max_restarts = {most} is used up, at step {reached[-1].step}"
    return None


def find_last_checkpoint(directory: Path) -> LastCheckpoint:
    """Return the checkpoint written last, by time: one of a higher step may be a damaged one, older than a resume."""
    from meshwright.checkpoint import find

    found = [LastCheckpoint(0, 0)]
    for candidate in find(directory):
        with contextlib.suppress(OSError):
            found.append(LastCheckpoint(candidate.path.stat().st_mtime_ns, candidate.step))
    return max(found)


def run_with_restarts(start: Callable[[], None], most: int, directory: Path, log: Callable[[str], object]) -> None:
    """Call ``start()``, and again after each transient failure, with at most ``most`` restarts.

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
            _log_failure(failure, directory)
            reached.append(find_last_checkpoint(directory))
            reason = find_stop_reason(reached, most)
            if reason is not None:
                count = len(reached) - 1
                times = f"{count} failure{'s' * (count > 1)}"
                message = f"given up after {times}: {reason}. The last failure:\n{failure}"
                raise RankFailed(message, failure.rank, GIVEN_UP_EXIT_CODE) from None
            first_line = str(failure).splitlines()[0]
        log(f"{first_line}; resuming from step {reached[-1].step}, restart {len(reached) - 1} of {most}")


def _log_failure(failure: RankFailed, directory: Path) -> None:
    """Append the whole message to a log file, because the line of a restart has only its first line."""
    with contextlib.suppress(OSError), (directory / "logs" / "failures.log").open("a") as log:
        log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n{failure}\n")
