"""Errors for people: each carries the value, the place and the next move.

Everything a user can cause derives from :class:`UserError`; the command line prints its message alone and leaves with
``exit_code``. Broken invariants are ``assert``: those are ours, and keep their traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """One clear message: what was found, where, and what to do next."""

    exit_code = 2


class ConfigError(UserError):
    """The configuration does not hold together. Carries every problem found, not the first one only."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class MeshError(UserError):
    """Ranks, nodes and axes do not fit together."""


class ModelError(UserError):
    """The model is not what a pipeline of stages can be cut from, or its sharding plan does not fit it."""


class ScheduleError(UserError):
    """A schedule that would hang, lose a micro-batch or compute one twice."""


class DataError(UserError):
    """The corpus, its index or its tokenizer is missing, damaged or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another model."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read (EIO, ESTALE). Its bytes may be sound, so that it is not skipped as damaged."""


class LockError(UserError):
    """Another job works in the run directory, or its lock cannot be used."""


class RunFilesError(UserError):
    """The run's own files were removed, replaced or could not be written while it trained."""

    exit_code = 20


class NonFiniteError(UserError):
    """A loss or a gradient is NaN or infinite; the step was not taken on any rank."""

    exit_code = 17


class HangError(UserError):
    """Nothing has moved on some rank for longer than ``launch.timeout_s``; names who waits for whom."""

    exit_code = 19


class HangEcho(HangError):
    """The run hangs, for the reason that another rank has printed."""


class DriftError(UserError):
    """Copies of a weight or of optimizer state that must be the same bits are not; nothing was saved of it."""

    exit_code = 18


class Preempted(UserError):
    """The run was asked to end, and has saved: the same command goes on. 85 is for schedulers: requeue me."""

    exit_code = 85


class CommunicationError(UserError):
    """A collective or an exchange failed or timed out; names the action and the peers."""

    exit_code = 1
