"""Restarts of a failed run from its newest checkpoint, as long as the run makes progress.

    start -- rank 1 was ended by SIGKILL --> resuming from step 160, restart 1 of 5
      |                                        with new checkpoints: as often as launch.max_restarts allows
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

from meshwright.errors import HangError, NonFiniteError, UserError
from meshwright_launch.failure import NodesLost, RankFailed

GIVEN_UP_EXIT_CODE = 93
RECURRING_EXIT_CODES = (UserError.exit_code, NonFiniteError.exit_code)
"""Exit codes of failures that a restart by a cluster's scheduler cannot get past."""
TRANSIENT_EXIT_CODES = (1, 18, HangError.exit_code)
"""Exit codes of failures that a restart on this machine may get past; 18:
drifted replicas (DriftError).
"""
MAX_FUTILE_RESTARTS = 3
"""Number of restarts in a row without a new checkpoint after which a run is given up."""


def is_transient(failure: RankFailed) -> bool:
    """Return True if a restart may get past the failure: a rank died, lost a peer,
    or raised an unexpected error.

    A hang and drifted replicas are also transient. A user's error and a NaN/Inf would recur. A run
    that was already ending after a signal is not restarted, nor one that has lost its nodes.
    """
    is_here = not failure.is_requested and not isinstance(failure, NodesLost)
    return is_here and failure.exit_code in TRANSIENT_EXIT_CODES


def find_stop_reason(seen: Sequence[frozenset[int]], most: int) -> str | None:
    """Return the reason not to restart the run, or None.

    ``seen``: steps of the run's checkpoints (:func:`find_steps`) at its start and after each of its
        failures.
    """
    num_restarts = len(seen) - 2
    futile = 0
    while futile < num_restarts and seen[-1 - futile] <= seen[-2 - futile]:
        futile += 1
    if futile >= MAX_FUTILE_RESTARTS:
        return f"{futile} restarts in a row never got past step {find_last_step(seen)}"
    if num_restarts >= most:
        return f"launch.max_restarts = {most} is used up, at step {find_last_step(seen)}"
    return None


def find_steps(directory: Path) -> frozenset[int]:
    """Return the steps of a run's checkpoints, damaged ones too."""
    from meshwright.run import places

    return places.find_steps(directory)


def find_last_step(seen: Sequence[frozenset[int]]) -> int:
    """Return the step of the checkpoint that was published last, or 0.

    It is one that was not there before. Its step need not be the highest, because a damaged
    checkpoint that a resume has skipped may have a higher one; its time need not be the latest,
    because a clock may have been set back.
    """
    for before, after in zip(seen[-2::-1], seen[:0:-1], strict=True):
        if after - before:
            return max(after - before)
    return max(seen[0], default=0)


def run_with_restarts(
    start: Callable[[], None],
    most: int,
    directory: Path,
    log: Callable[[str], object],
    mirrored: Callable[[], int] = lambda: 0,
) -> None:
    """Call ``start()``, and again after each transient failure, with at most ``most`` restarts.

    ``mirrored``: function that returns the newest step in memory, 0 without any: a restart resumes
        from it too.

    Raises:
        RankFailed: a failure that would recur; with exit code 93 if the run was given up.
    """
    if most == 0:
        start()
        return
    seen = [find_steps(directory) | {mirrored()}]
    while True:
        try:
            start()
            return
        except RankFailed as failure:
            if not is_transient(failure):
                raise
            log_failure(failure, directory)
            seen.append(find_steps(directory) | {mirrored()})
            reason = find_stop_reason(seen, most)
            if reason is not None:
                count = len(seen) - 1
                times = f"{count} failure{'s' * (count > 1)}"
                message = f"given up after {times}: {reason}. The last failure:\n{failure}"
                raise RankFailed(message, failure.rank, GIVEN_UP_EXIT_CODE) from None
            first_line = str(failure).splitlines()[0]
        log(
            f"{first_line}; resuming from step {find_last_step(seen)}, restart {len(seen) - 1} of"
            f" {most}"
        )


def log_failure(failure: RankFailed, directory: Path) -> None:
    """Append the whole message to a log file,
    because the line of a restart has only its first line.
    """
    with (
        contextlib.suppress(OSError),
        (directory / "logs" / "failures.log").open(
            "a", encoding="utf-8", errors="backslashreplace"
        ) as log,
    ):
        log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n{failure}\n")
