"""Lock of a run directory, one job at a time: rank 0 locks ``runs/NAME/lock`` while it runs.

first job     rank 0     locks it, writes its host and process .. ends, or is killed: the kernel releases the lock
second job    launcher   finds it locked for 2 s: one message that names the first job, exit code 2
later         rank 0     locks it, regardless of the file's content

This is a kernel lock (flock) on the open file, so a killed job leaves nothing to clean up. The file
stays; its one line of JSON is for the message alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from meshwright.errors import LockError
from meshwright.system.bounded import MIB, parse_json, read_bytes
from meshwright.system.host import JOBSET
from meshwright.system.numbers import job_restarts
from meshwright.system.process import FileLock
from meshwright.terminal.output import tell

if TYPE_CHECKING:  # the launcher checks the lock before it imports torch
    from meshwright.mesh.mesh import Mesh

FILE = "lock"
PATIENCE_S = 2.0
"""Seconds to retry a held lock: its holder may be ending."""
OWN_JOB_PATIENCE_S = 240.0
"""Seconds to retry if the holder is an earlier start of this Slurm job or JobSet,
alive on an unreachable node.
"""
PAUSE_S = 0.1
TRIES = 3
"""Attempts to take a lock that was removed meanwhile."""
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""errno values of flock on a file system without locks."""


class RunLock:
    """Lock of a run directory: within the block no other process on any node works
    in ``directory``.

    Child processes do not inherit it. On a file system without locks a warning is printed, and the
    run continues.

    Raises:
        LockError: another job holds it, or the file cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._file: FileLock | None = None
        self._is_watched = True

    def __enter__(self) -> Self:
        try:
            locked = self._open_and_lock()
            for _ in range(TRIES):
                if self.is_in_place():
                    break
                self._close()  # removed between opening and locking: other jobs would not see it
                locked = self._open_and_lock()
            else:
                self._is_watched = False  # a file system that gives one file several inode numbers
            if locked and self._file is not None:
                text = json.dumps(_holder()) + "\n"
                os.ftruncate(self._file.descriptor, 0)
                os.pwrite(self._file.descriptor, text.encode(), 0)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise _unusable(self.path, error) from error
            raise
        return self

    def _open_and_lock(self) -> bool:
        self._file = FileLock(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        return self._wait_for(self._file)

    def __exit__(self, *error: object) -> None:
        self._close()

    def check_free(self) -> None:
        """Raise as ``with`` would, but take no lock and create no file.

        Raises:
            LockError: another job is in the directory.
        """
        # OSError: there is no file yet, or it cannot be read; taking the lock reports that
        with contextlib.suppress(OSError), FileLock(self.path, os.O_RDONLY) as file:
            self._wait_for(file, is_shared=True)

    def is_in_place(self) -> bool:
        """Check whether the open file is the one at the path. If the file system cannot answer,
        the result is True.
        """
        if self._file is None or not self._is_watched:
            return True
        try:
            return os.path.samestat(os.fstat(self._file.descriptor), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that does not respond: a write will fail
            return True

    def retake(self) -> None:
        """Make the file again, or open the existing one, and lock it. The directory must exist.

        Raises:
            LockError: another job has it, or the file cannot be opened.
        """
        fresh = RunLock(self.path.parent)
        try:
            fresh.__enter__()
        except LockError:
            # the file system gave the same file another inode number
            if not _is_this_process(self.path):
                raise
            self._is_watched = False
            return
        self._close()
        self._file, fresh._file = fresh._file, None

    def _wait_for(self, file: FileLock, *, is_shared: bool = False) -> bool:
        """Take the lock, with retries for a job that is ending;
        return False on a file system without locks.

        Raises:
            LockError: another job still holds it.
        """
        start_s = time.monotonic()
        while True:
            try:
                if file.take(is_shared=is_shared):
                    return True
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                if not is_shared:
                    _warn(self.path, error)
                return False
            # also before the file is read: a new holder has written its line by then
            time.sleep(PAUSE_S)
            if time.monotonic() > start_s + (
                OWN_JOB_PATIENCE_S if _is_own_job(self.path) else PATIENCE_S
            ):
                raise LockError("MW-RUN-011", _refusal(self.path))

    def _close(self) -> None:
        """Close the file, which releases the lock."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


@contextlib.contextmanager
def lock_directory(directory: Path, mesh: Mesh) -> Iterator[RunLock | None]:
    """Hold the lock of ``directory`` on rank 0 within the ``with`` block.
    Collective over all ranks; blocks.

    Yields:
        The lock on rank 0, None on the others.

    Raises:
        LockError: the same on every rank.
    """
    problem: str | None = None
    lock: RunLock | None = None
    with contextlib.ExitStack() as stack:
        if mesh.rank == 0:
            try:
                lock = stack.enter_context(RunLock(directory))
            except LockError as error:
                problem = error.message
        problem = mesh.world.gather_objects(problem)[0]
        if problem is not None:
            raise LockError("MW-RUN-012", problem)
        yield lock


def _holder() -> dict[str, str | int]:
    """Return the line that describes this holder to other jobs."""
    holder: dict[str, str | int] = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    }
    jobs = {"slurm_job": os.environ.get("SLURM_JOB_ID"), "jobset": os.environ.get(JOBSET)}
    return holder | {kind: job for kind, job in jobs.items() if job}


def _read_holder(path: Path) -> dict[str, Any]:
    """Return the line that :func:`_holder` wrote; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = parse_json(read_bytes(path, MIB))
        return found if isinstance(found, dict) else {}
    return {}


def _is_this_process(path: Path) -> bool:
    """Return True if the holder is this very process."""
    holder = _read_holder(path)
    return bool(holder.get("host") == socket.gethostname() and holder.get("process") == os.getpid())


def _is_own_job(path: Path) -> bool:
    """Return True if the holder is this process's own Slurm job, from before it was requeued,
    or its own JobSet.
    """
    jobset, job = os.environ.get(JOBSET), os.environ.get("SLURM_JOB_ID")
    is_requeued = job_restarts() > 0
    holder = _read_holder(path)
    return bool(
        (jobset and holder.get("jobset") == jobset)
        or (is_requeued and job and holder.get("slurm_job") == job)
    )


def _refusal(path: Path) -> str:
    """Return the error message, with the holder if it can be read."""
    found = _read_holder(path)
    who = "another job"
    if {"process", "host", "since"} <= found.keys():
        job = f" of Slurm job {found['slurm_job']}" if "slurm_job" in found else ""
        job += f" of JobSet {found['jobset']}" if "jobset" in found else ""
        who = f"process {found['process']}{job} on {found['host']}, since {found['since']},"
    return f"{who} works in {path.parent}: wait until it ends, end it, or choose another run.name"


def _unusable(path: Path, error: OSError) -> LockError:
    return LockError(
        "MW-RUN-013",
        f"the lock of this run, {path}, cannot be used: {error.strerror}. It keeps a second job out"
        " of the run directory: make the file writable, or choose another run.directory or"
        " run.name",
    )


def _warn(path: Path, error: OSError) -> None:
    tell(
        f"warning: {path} cannot be locked here ({error.strerror}): make sure that no second job is"
        f" started in {path.parent}"
    )
