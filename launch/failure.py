"""What a rank says when it fails, and which of many failures is the cause: the first, and not an echo of it."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.errors import CommunicationError, HangEcho, UserError

LOG_TAIL_LINES = 20
LOG_HEAD = "=== started "
"""Begins the part of a log file that one process wrote: a resumed run goes on in the same file."""


class RankFailed(Exception):
    """A rank failed; the message is for people, the first failure first."""

    def __init__(self, message: str, rank: int, exit_code: int = 1) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.asked = False
        """The run had been asked to end before, by a signal."""
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    """What a rank writes down when it fails; ``at_s`` is on the clock that all processes of a machine share."""

    rank: int
    at_s: float
    message: str
    """One line, or the whole message when the user can do something about it."""
    trace: str
    """Empty when the user can do something about it."""
    exit_code: int
    lost_peer: bool
    """An echo: a peer was gone, or silent for too long."""


def describe(error: BaseException, rank: int) -> Failure:
    """A failure in words: for what a user can cause the message alone, for all else the traceback."""
    lost_peer = _lost_peer(error)
    if isinstance(error, UserError):
        return Failure(rank, time.monotonic(), str(error), "", error.exit_code, lost_peer)
    message = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(
        rank, time.monotonic(), message, trace, 130 if isinstance(error, KeyboardInterrupt) else 1, lost_peer
    )


def _lost_peer(error: BaseException | None) -> bool:
    """Whether the error came out of communication: the framework's own kind, or torch's bare one."""
    while error is not None:
        if isinstance(error, CommunicationError | HangEcho):
            return True
        if isinstance(error, RuntimeError) and any(name in str(error).lower() for name in ("gloo", "nccl")):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_down(failure: Failure, notes: Path) -> None:
    """Leave a note for the launcher; whole or not at all."""
    aside = notes / f"{failure.rank}.part"
    aside.write_text(json.dumps(asdict(failure)))
    aside.rename(notes / f"{failure.rank}.json")


def read_notes(notes: Path) -> list[Failure]:
    """The failures that were written down: causes before echoes, then the earliest first."""
    failures = [Failure(**json.loads(note.read_text())) for note in notes.glob("*.json")]
    return sorted(failures, key=lambda failure: (failure.lost_peer, failure.at_s))


def told(noticed: int, exit_code: int, failures: Sequence[Failure], logs: Path) -> RankFailed:
    """The error to show. ``noticed``: the rank whose end was seen first; ``failures``: from :func:`read_notes`."""
    if all(failure.rank != noticed for failure in failures):  # it could not write: killed, or crashed in C++
        return RankFailed("\n".join([_unwritten(noticed, exit_code, logs), *_then(failures)]), noticed)
    first, rest = failures[0], [failure for failure in failures[1:] if failure.message != failures[0].message]
    if not first.trace:  # most often every rank would say it, and some were ended before they could
        return RankFailed(first.message, first.rank, first.exit_code)
    return RankFailed(
        "\n".join([f"rank {first.rank}: {first.message}", first.trace, *_then(rest)]), first.rank, first.exit_code
    )


def _then(failures: Sequence[Failure]) -> list[str]:
    """What came after the first failure; all echoes in one line."""
    lines = [f"then rank {each.rank}: {each.message.splitlines()[0]}" for each in failures if not each.lost_peer]
    echoes = sorted(each.rank for each in failures if each.lost_peer)
    if echoes:
        lines.append(f"then lost a peer: rank{'s' * (len(echoes) > 1)} {', '.join(map(str, echoes))}")
    return lines


def _unwritten(rank: int, exit_code: int, logs: Path) -> str:
    how = f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"left with exit code {exit_code}"
    hint = ": if nobody sent it, the kernel was out of memory (`dmesg` tells)" if exit_code == -signal.SIGKILL else ""
    lines = [f"rank {rank} {how}{hint}"]
    log = logs / f"rank-{rank}.log"
    if rank != 0 and log.exists():
        tail = log.read_text(errors="replace").rpartition(LOG_HEAD)[2].splitlines()[1:][-LOG_TAIL_LINES:]
        lines += [f"the end of {log}:", *(f"  {line}" for line in tail)] if tail else []
    return "\n".join(lines)
