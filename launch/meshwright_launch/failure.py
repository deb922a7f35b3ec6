"""Failure records of ranks, and the root cause among many failures:
the first one that is not an echo of another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.errors import CommunicationError, HangEcho, UserError
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import MIB, open_regular, parse_json, read_text
from meshwright.system.numbers import whole_number

LOG_TAIL_LINES = 20
FAILURES = "MESHWRIGHT_FAILURES"
"""Environment variable with a directory,
for failure records of ranks that torchrun has started (pod.py).
"""
OWN_EXIT_CODES = {UserError.exit_code} | {each.exit_code for each in UserError.__subclasses__()}
"""Exit codes of meshwright's errors, valid without a failure record too."""
LOG_HEAD = "=== started "
"""Start of a process's part of a log file; a resumed run appends to the same file."""


class RankFailed(Exception):
    """Failure of a rank. The message is for the user and begins with the first failure."""

    def __init__(self, message: str, rank: int, exit_code: int = 1) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.is_requested = False
        """Flag: a signal had already requested the end of the run."""
        super().__init__(message)


class NodesLost(RankFailed):
    """Too few nodes are left for the ranks: a restart here cannot succeed, a start on others may."""


@dataclass(frozen=True)
class FailureRecord:
    """Failure record of a rank. ``at_s`` is read from the clock that all processes
    of a machine share.
    """

    rank: int
    at_s: float
    message: str
    """One line, or the whole message of a user error."""
    trace: str
    """Traceback; empty for a user error."""
    exit_code: int
    lost_peer: bool
    """Flag: the failure is an echo, because a peer was gone or silent for too long."""


def describe(error: BaseException, rank: int) -> FailureRecord:
    """Return the failure record of an exception: the message alone for a user error,
    else also the traceback.
    """
    lost_peer = has_lost_peer(error)
    if isinstance(error, UserError):
        return FailureRecord(rank, time.monotonic(), str(error), "", error.exit_code, lost_peer)
    message = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error)).rstrip()
    exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
    return FailureRecord(rank, time.monotonic(), message, trace, exit_code, lost_peer)


def has_lost_peer(error: BaseException | None) -> bool:
    """Return True for an error of communication: the framework's own type,
    or a plain RuntimeError of torch.
    """
    while error is not None:
        if isinstance(error, CommunicationError | HangEcho):
            return True
        # torch's: rank 0's store is gone
        if type(error).__name__ in ("DistStoreError", "DistNetworkError"):
            return True
        if isinstance(error, RuntimeError) and any(
            name in str(error).lower() for name in ("gloo", "nccl")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def text_of(failure: FailureRecord) -> str:
    """Return what a rank of torchrun or srun prints: the traceback,
    but one message where it has lost a peer.

    Then the rank that failed first has the traceback that matters.
    """
    if not failure.lost_peer or not failure.trace:
        return failure.trace or failure.message
    first = failure.message.splitlines()[0] if failure.message else "the connection was closed"
    return (
        f"lost a peer: {first}. Look at the message of the rank that ended first; the same command"
        " resumes the run"
    )


def write_failure(failure: FailureRecord, records: Path) -> None:
    """Write a failure record for the launcher, atomically."""
    write_atomic(records / f"{failure.rank}.json", json.dumps(asdict(failure)), is_durable=False)


def leave_record(failure: FailureRecord) -> None:
    """Write a failure record to the directory in FAILURES, if set,
    unless this rank has written one already.
    """
    records = os.environ.get(FAILURES)
    if records and not Path(records, f"{failure.rank}.json").exists():
        with contextlib.suppress(OSError):
            write_failure(failure, Path(records))


def leave_exit_code(exit_code: int) -> None:
    """Write a record with an exit code only, for a failure whose message is printed,
    if this process is a rank.
    """
    rank = whole_number(os.environ.get("RANK", ""))
    if exit_code and rank is not None:
        leave_record(FailureRecord(rank, time.monotonic(), "", "", exit_code, lost_peer=False))


def read_failures(records: Path) -> list[FailureRecord]:
    """Return the written failure records: causes before echoes, then the earliest first."""
    return causes_first(
        FailureRecord(**parse_json(read_text(file))) for file in records.glob("[0-9]*.json")
    )


def read_failure(records: Path, rank: int) -> FailureRecord | None:
    """Return the failure record of a rank; None: it has written none."""
    try:
        return FailureRecord(**parse_json(read_text(records / f"{rank}.json")))
    except FileNotFoundError:
        return None


def causes_first(failures: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Return failures in order: causes before echoes, then the earliest first."""
    return sorted(failures, key=lambda failure: (failure.lost_peer, failure.at_s))


def build_error(
    noticed: int, exit_code: int, failures: Sequence[FailureRecord], logs: Path
) -> RankFailed:
    """Return the error of the run: the root cause, then the other failures in one line each.

    Args:
        noticed: Rank whose process the launcher saw end first, with ``exit_code``.
        failures: Records as :func:`read_failures` returns them.
        logs: Directory of the ranks' logs.
    """
    if all(
        failure.rank != noticed for failure in failures
    ):  # no record: killed, crashed in C++, or a full disk
        lines = [_describe_exit(noticed, exit_code, logs), *_later_failures(failures)]
        return RankFailed(
            "\n".join(lines), noticed, exit_code if exit_code in OWN_EXIT_CODES else 1
        )
    first, rest = (
        failures[0],
        [failure for failure in failures[1:] if failure.message != failures[0].message],
    )
    # usually every rank has the same error, and some were ended before they could report it
    if not first.trace:
        return RankFailed(first.message, first.rank, first.exit_code)
    lines = [f"rank {first.rank}: {first.message}", first.trace, *_later_failures(rest)]
    return RankFailed("\n".join(lines), first.rank, first.exit_code)


def _later_failures(failures: Sequence[FailureRecord]) -> list[str]:
    """Return lines for the failures after the first; all echoes share one line."""
    lines = [
        f"then rank {each.rank}: {each.message.splitlines()[0]}"
        for each in failures
        if not each.lost_peer
    ]
    echoes = sorted(each.rank for each in failures if each.lost_peer)
    if echoes:
        lines.append(
            f"then lost a peer: rank{'s' * (len(echoes) > 1)} {', '.join(map(str, echoes))}"
        )
    return lines


def _end_of(log: Path) -> str:
    """Return the last MiB of a log, "" if it cannot be read: a log has no limit."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MIB))
            return file.read(MIB).decode(errors="replace")
    except OSError:
        return ""


def _describe_exit(rank: int, exit_code: int, logs: Path) -> str:
    """Return the exit of a rank without a failure record, and the end of its log."""
    how = (
        f"was ended by {signal.Signals(-exit_code).name}"
        if exit_code < 0
        else f"exited with code {exit_code}"
    )
    hint = (
        ": if nobody sent it, the kernel was out of memory (see `dmesg`)"
        if exit_code == -signal.SIGKILL
        else ""
    )
    lines = [f"rank {rank} {how}{hint}"]
    log = logs / f"rank-{rank}.log"
    if rank != 0 and log.exists():
        tail = _end_of(log).rpartition(LOG_HEAD)[2].splitlines()[1:][-LOG_TAIL_LINES:]
        lines += [f"the end of {log}:", *(f"  {line}" for line in tail)] if tail else []
    return "\n".join(lines)
