"""Files of a live run: one stat of the lock per step detects a lost lock or directory,
which is restored.

    loss                                                 action of the run
    the lock alone is gone                               locks again; stops if another job has the lock
    the directory is gone: deleted, or moved away        recreates it from memory, saves at once, continues
    another, empty directory in its place                the same
    another run's directory in its place                 stops, and never writes there; moved: saves at the new path
    another file system in its place (unmounted)         stops

Configuration, starts and placement are restored from memory. metrics.jsonl and the ranks' logs are
restored from their open descriptors, which hold the bytes of a deleted file. Older checkpoints,
traces and other files are lost.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshwright.config import Run
from meshwright.errors import ConfigError, LockError
from meshwright.run.directory import (
    METRICS,
    METRICS_AGAIN,
    PEAKS,
    PLACEMENT,
    RESOLVED,
    STARTS,
    STATUS,
    run_directory,
)
from meshwright.run.lock import FILE, RunLock
from meshwright.system.atomic import (
    make_directory_synced,
    replace_in,
    sync_with_folders,
    write_atomic,
)
from meshwright.system.bounded import MAX_FILE_BYTES, read_bytes, why_unusable
from meshwright.terminal.output import Warn

RESTORED_FILES = (RESOLVED, "config.toml", STARTS, PLACEMENT)
"""Small files that a run writes at its start and keeps in memory."""
REQUIRED_FILES = (*RESTORED_FILES, METRICS, METRICS_AGAIN)
"""Files that a checkpoint needs beside itself."""
RECORDS = ("expert-load.jsonl", PEAKS, "wandb_run_id", "mlflow_run_id")
"""Files that a resumed run continues, or that describe steps that it does not repeat."""
SYNCED_FILES = (*REQUIRED_FILES, *RECORDS)
"""NOTE [files of a checkpoint]: what a checkpoint presupposes is on the disk before its name is. A
file of a fixed name in the run's directory is listed here; an observer adds any other to
``parts.written_files``. `sync_run_files` syncs both lists and the directories above. A file in
neither list (lock, status, logs, stacks) may be lost in a power cut.
"""
OTHER_FILES = (*RECORDS, "bad-nodes", "links.toml")
"""Files that a run, or a command on it, writes beside those that a checkpoint needs."""
FOLDERS = ("logs", "hang", "slurm", "traces")
"""Folders of a run whose files are written by their names."""
SINK_FOLDERS = ("routing", "wandb", "tensorboard", "mlflow")
"""Folders of a run whose files are replaced, or have names of their own;
wandb makes links in its folder.
"""
DELETED = " (deleted)"
"""Suffix that the kernel adds to the path of an open file that was deleted."""


def check_run_files(directory: Path) -> None:
    """Refuse a run directory with something unusable in place of a run's file: a FIFO blocks,
    a link leads elsewhere.

    Raises:
        ConfigError: names each such path and the reason.
    """
    problems = []
    folders = [directory / name for name in FOLDERS]
    whole = [*folders, *(directory / name for name in SINK_FOLDERS)]
    named = [directory / name for name in (*REQUIRED_FILES, FILE, STATUS, *OTHER_FILES)]
    inside = [
        path
        for folder in folders
        if folder.is_dir() and not folder.is_symlink()
        for path in folder.iterdir()
    ]
    for path in (*named, *whole, *inside):
        is_log = path.name in (METRICS, METRICS_AGAIN, "expert-load.jsonl") or path in inside
        why = None if path in whole else why_unusable(path, None if is_log else MAX_FILE_BYTES)
        if is_log and path.is_dir():  # records wait until they can be written
            why = None
        if path.is_symlink():
            why = "is a symbolic link, through which the run would write a file somewhere else"
        if why is not None:
            problem = f"{path} {why}: move it away, or choose another run.name"
            problems.append(ConfigError("MW-RUN-009", problem))
    if problems:
        raise ConfigError.join(problems)


def make_directory(run: Run) -> Path:
    """Make the run's directory, and check that it can be written to.

    Raises:
        ConfigError: it cannot be made or written to, or holds something unusable.
    """
    directory = run_directory(run)
    problem = None
    try:
        make_directory_synced(directory)
    except OSError as error:
        problem = "is a file"
        if not isinstance(error, FileExistsError):
            problem = f"cannot be made: {error.strerror}"
    if problem is None and not os.access(directory, os.W_OK | os.X_OK):
        problem = "cannot be written to"
    if problem is not None:
        raise ConfigError(
            "MW-RUN-010",
            f"the directory of this run, {directory}, {problem}; choose another run.directory or"
            " run.name",
        )
    check_run_files(directory)
    return directory


class Recovery(NamedTuple):
    """Outcome of recovering lost files."""

    message: str
    must_stop: bool = False
    """True if the directory now belongs to another run, or cannot be recreated."""
    is_new: bool = False
    """True if the directory was recreated and has no checkpoint."""
    moved_to: Path | None = None
    """New path of the directory of a run that must stop."""


class RunFiles:
    """Directory of a live run. Only the rank that holds the lock detects losses;
    the others always report none.
    """

    def __init__(self, directory: Path, lock: RunLock | None) -> None:
        """Remember the identity of the directory. ``lock``: held by this rank;
        None on the other ranks.
        """
        self.directory = directory
        self._lock = lock
        self._descriptor = -1 if lock is None else _open(directory)
        self._changing = threading.Lock()
        """Lock of the descriptor, which :meth:`write` copies in other threads."""
        self._contents: dict[str, bytes] = {}
        """Contents of :data:`RESTORED_FILES`, by name."""

    def close(self) -> None:
        """Close the directory."""
        with self._changing:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def remember(self) -> None:
        """Read the small files of the run's start into memory."""
        for name in RESTORED_FILES:
            with contextlib.suppress(OSError):
                self._contents[name] = read_bytes(self.directory / name)

    def are_lost(self) -> bool:
        """Check whether the held lock is no longer the file at its path. One stat;
        called in every step.
        """
        return self._lock is not None and not self._lock.is_in_place()

    def write(self, name: str, text: str) -> None:
        """Replace a file of the run atomically, from any thread,
        and never in a directory that took this one's place.

        Does nothing while the directory is lost, and on ranks that do not hold the lock.
        """
        with self._changing:
            if self._descriptor < 0:
                return
            directory = os.dup(self._descriptor)
        try:
            if not self.are_lost():
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    replace_in(directory, name, text)
        finally:
            os.close(directory)

    def recover(self) -> Recovery:
        """Find the cause of the loss, and restore the lock or the directory.
        Never writes into another run.
        """
        assert self._lock is not None
        directory, before = self.directory, os.fstat(self._descriptor)
        try:
            now = directory.stat()
        except OSError:
            now = None
        try:
            if now is not None and os.path.samestat(before, now):
                self._lock.retake()
                return Recovery(
                    f"{directory / FILE}, the lock of this run, was removed or replaced: locked"
                    " again"
                )
            moved_to = self._moved_to()
            cause = "was deleted" if moved_to is None else f"was moved to {moved_to}"
            above = next(
                each for each in (directory, *directory.absolute().parents) if each.exists()
            )
            if above.stat().st_dev != before.st_dev:
                return _stop(
                    f"{directory} is on another file system than before: was it unmounted?"
                )
            if now is not None and _belongs_to_another_run(directory):
                return _stop(
                    f"{directory} {cause}, and another run's directory is in its place", moved_to
                )
            self._recreate()
        except LockError as error:
            return _stop(f"the lock of this run was removed during training, and {error.message}")
        except OSError as error:
            return _stop(
                f"{directory} is gone and cannot be recreated: {error.filename}: {error.strerror}"
            )
        return Recovery(
            f"{directory} {cause} during training. It is recreated from memory: configuration,"
            " starts, metrics and logs; this step is saved now. Older checkpoints and traces are"
            " lost",
            is_new=True,
        )

    def _recreate(self) -> None:
        """Create the directory again, with the lock and the small files."""
        assert self._lock is not None
        make_directory_synced(self.directory)
        self._lock.retake()
        self.close()
        self._descriptor = _open(self.directory)
        for name, data in self._contents.items():
            write_atomic(self.directory / name, data)

    def _moved_to(self) -> Path | None:
        """Return the current path of the open directory, or None if it was deleted."""
        with contextlib.suppress(OSError):
            path = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            if not str(path).endswith(DELETED) and os.path.samestat(
                path.stat(), os.fstat(self._descriptor)
            ):
                return path
        return None


def _stop(message: str, moved_to: Path | None = None) -> Recovery:
    return Recovery(message, must_stop=True, moved_to=moved_to)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _belongs_to_another_run(directory: Path) -> bool:
    """Return True if a directory has files of a run,
    other than those that this run may have made there meanwhile.
    """
    return any((directory / name).exists() for name in (*REQUIRED_FILES, FILE)) or any(
        directory.glob("checkpoints/step-*")
    )


def sync_run_files(directory: Path, written: Iterable[Path], warn: Warn) -> None:
    """Flush what a checkpoint presupposes to the disk, before it appears:
    see NOTE [files of a checkpoint].

    A file that cannot be flushed only causes a warning: the checkpoint is more important.

    ``written``: files that observers have added since the last checkpoint.
    """
    for path, error in sync_with_folders([*(directory / name for name in SYNCED_FILES), *written]):
        warn(
            f"{path} cannot be flushed to the disk ({error.strerror}, errno {error.errno}): it may"
            " be lost in a power failure"
        )


def reopen_outputs(directory: Path) -> None:
    """Restore the files of stdout and stderr, with their contents,
    if they were deleted with the run directory.

    Every rank calls it once the directory exists again. Other outputs (a terminal, a pipe, another
    file) stay.
    """
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            link = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            path = Path(link.removesuffix(DELETED))
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if (
                not is_file
                or not link.endswith(DELETED)
                or not path.is_relative_to(directory.resolve())
            ):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if os.fstat(target).st_size == 0:  # else stdout and stderr are one file, copied already
                with Path(f"/proc/self/fd/{descriptor}").open("rb") as old:
                    while block := old.read(1 << 20):
                        os.write(target, block)
            os.dup2(target, descriptor)
            os.close(target)
