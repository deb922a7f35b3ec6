"""Errors for users: each message has the value found, the place, the next move and a stable code.

Everything a user can cause derives from :class:`UserError`; the command line prints its text alone
and leaves with ``exit_code``. Broken invariants are ``assert``: bugs of meshwright, with a
traceback. ``meshwright errors`` lists all codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

MAX_REASON = 2000
"""Characters of another error's text in a message."""


class UserError(Exception):
    """Error that a user can cause and fix: a stable code, and a message with the finding,
    the place and the next step.

    A code (``MW-ROOM-NUMBER``) is the first argument of every error, as a literal. It names one
    cause for good: the words of the message may change, a code is never given to another cause.
    ``str(error)`` ends its first line with it.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, *details: object) -> None:
        super().__init__(code, message, *details)
        self.code = code
        self.message = message

    @property
    def problems(self) -> list[Self]:
        """The problems that :meth:`join` put together, each with its own code;
        an error by itself has one.
        """
        return [problem for problem in self.args[2:] if isinstance(problem, type(self))] or [self]

    @classmethod
    def join(cls, problems: Sequence[Self]) -> Self:
        """Return one error for several problems: the code of the first,
        and a line or more for each.
        """
        return cls(problems[0].code, "\n".join(problem.message for problem in problems), *problems)

    def extended(self, text: str) -> Self:
        """Return the error with ``text`` at the end of its message."""
        return type(self)(self.code, f"{self.message}{text}")

    def __str__(self) -> str:
        if any(isinstance(detail, UserError) for detail in self.args[2:]):
            return "\n".join(map(str, self.args[2:]))
        first, newline, rest = self.message.partition("\n")
        return f"{first} [{self.code}]{newline}{rest}"


def reason_of(error: BaseException) -> str:
    """Return the type and the text of an error of the user's code, for a message;
    its text may fail or be endless.
    """
    try:
        text = str(error)
    except BaseException as other:  # of a class of the user's
        text = f"its text cannot be formatted: {type(other).__name__}"
    return f"{type(error).__name__}: {text[:MAX_REASON]}"


class ConfigError(UserError):
    """Invalid or inconsistent configuration. Carries every problem found, not only the first."""


class MeshError(UserError):
    """Mismatch between ranks, nodes and axes of the mesh."""


class MissingRanksError(MeshError):
    """Ranks that did not arrive at the rendezvous in time. A later start, on other nodes,
    may succeed.
    """

    exit_code = 1

    def __init__(self, code: str, message: str, nodes: tuple[str, ...] = ()) -> None:
        self.nodes = nodes
        """Nodes without any rank at the rendezvous, if the fault seems to be theirs."""
        super().__init__(code, message, nodes)


class ModelError(UserError):
    """Model that cannot be split into pipeline stages, or that its sharding plan does not fit."""


class CallbackError(UserError):
    """Callback of the user that failed on some rank; the run has ended on every rank,
    with what was due saved.
    """

    exit_code = 1


class ScheduleError(UserError):
    """Schedule that would hang, lose a micro-batch or compute one twice."""


class DataError(UserError):
    """Corpus, index or tokenizer that is missing, damaged or does not fit the model."""


class CheckpointError(UserError):
    """Checkpoint that is missing, damaged or belongs to another model."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read (EIO, ESTALE). Its bytes may be sound,
    so that it is not skipped as damaged.
    """


class StoreAwayError(UnreadableError):
    """An object store does not answer. A later start, or a restart, may succeed."""

    exit_code = 1


class LockError(UserError):
    """Run directory that is locked by another job, or whose lock cannot be used."""


class RunFilesError(UserError):
    """Files of the run that were removed, replaced or could not be written during training."""

    exit_code = 20


class NonFiniteError(UserError):
    """NaN or Inf in a loss or a gradient. The step was not taken on any rank."""

    exit_code = 17


class HangError(UserError):
    """Hang: no progress on some rank for longer than ``launch.timeout_s``.
    Names the blocked ranks and their peers.
    """

    exit_code = 19
    linger: Callable[[], object] = staticmethod(lambda: None)
    """Function to call between the message and the end of this process,
    which other ranks may need a little longer.
    """
    stuck: tuple[int, ...] = ()
    """Ranks that keep all others waiting, and whose replacement lets them go on; empty: not known."""
    for_s = 0.0
    """Seconds for which nothing has moved."""


class HangEcho(HangError):
    """The run hangs, for the reason that another rank has printed."""


class DriftError(UserError):
    """Replicas of a weight or of optimizer state that must be bitwise equal and are not.
    Nothing of it was saved.
    """

    exit_code = 18


class Preempted(UserError):
    """Requested end of a run, after saving: the same command resumes it.
    Exit code 85 asks a scheduler to requeue.
    """

    exit_code = 85


class CommunicationError(UserError):
    """Collective or exchange that failed or timed out. Names the action and the peers."""

    exit_code = 1
