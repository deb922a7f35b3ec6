"""Paths of checkpoints, and their file operations: write with fsync and hash, read with retries,
delete.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, overload

from meshwright.errors import CheckpointError, StoreAwayError, UnreadableError
from meshwright.mesh import Grid
from meshwright.system.atomic import rename_synced
from meshwright.system.bounded import open_regular
from meshwright.system.store import Place, StoreAccess, StoreError, StorePath
from meshwright.terminal.output import Warn

Found = TypeVar("Found")
MAX_FILE_BYTES = 512 * 2**20
"""Default size at which a shard starts another file."""
DELETED_SUFFIX = "-deleted"
"""Suffix of a directory while its files are deleted."""
READ_PAUSES_S = 0.1, 0.5, 2.0
"""Seconds between attempts to read after an OSError."""


@overload
def checkpoints_directory(run_directory: Path) -> Path: ...


@overload
def checkpoints_directory(run_directory: Place) -> Place: ...


def checkpoints_directory(run_directory: Place) -> Place:
    """Return the directory of the checkpoints of a run; in an object store they lie in the run's
    own path, which has nothing else.
    """
    return run_directory if isinstance(run_directory, StorePath) else run_directory / "checkpoints"


def step_name(step: int) -> str:
    """Return the name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


@overload
def final_directory(run_directory: Path, step: int) -> Path: ...


@overload
def final_directory(run_directory: Place, step: int) -> Place: ...


def final_directory(run_directory: Place, step: int) -> Place:
    """Return the directory of a step's published checkpoint."""
    return checkpoints_directory(run_directory) / step_name(step)


def temporary_directory(run_directory: Path, step: int, attempt: str) -> Path:
    """Return the directory that an attempt writes to. It is beside the final one,
    so that one rename publishes it.
    """
    assert re.fullmatch(r"[A-Za-z0-9]+", attempt), attempt
    return checkpoints_directory(run_directory) / f".tmp-{step_name(step)}-{attempt}"


def shard_name(grid: Grid, rank: int) -> str:
    """Return the name of the shard that a rank writes, such as pp0-dp1-tp0."""
    at = grid.coordinates(rank)
    of_cp = f"-cp{at.cp_rank}" if grid.cp > 1 else ""
    return f"pp{at.pp_rank}-dp{at.dp_rank}{of_cp}-tp{at.tp_rank}"


@lru_cache(maxsize=4)
def shard_names(grid: Grid) -> tuple[str, ...]:
    """Return the names of the shards of all ranks, in order."""
    return tuple(shard_name(grid, rank) for rank in range(grid.size))


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Convert an OSError into a CheckpointError that names the path and the errno."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "MW-CHECKPOINT-003",
            f"{error.filename or path}: {error.strerror} (errno {error.errno}): free space or"
            " repair the directory; published checkpoints are unchanged",
        ) from error


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write the chunks to a new file and fsync it.
    Return its size and the sha256 of the *intended* bytes.

    The hash is taken from memory while writing, not by reading back, so that it can detect errors
    of the disk.
    """
    digest = hashlib.sha256()
    size = 0
    with as_checkpoint_error(path), path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def sha256_of(path: Place, size: int) -> str:
    """Hash a file as it is stored now. Raises UnreadableError. ``size``: its bytes, for an object."""

    def read() -> str:
        if isinstance(path, StorePath):
            digest = hashlib.sha256()
            for chunk in StoreAccess().chunks(path, size):
                digest.update(chunk)
            return digest.hexdigest()
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return retried(read, path)


def retried(read: Callable[[], Found], path: Place) -> Found:
    """Read, with retries after an OSError: a network file system may recover.
    Of an object store each request has been retried.

    Raises:
        UnreadableError: Every attempt failed; contains the last errno.
    """
    for pause_s in (*READ_PAUSES_S, None):
        try:
            return read()
        except OSError as error:
            if isinstance(error, StoreError) and error.is_passing:
                raise StoreAwayError(
                    "MW-CHECKPOINT-036",
                    f"{error.filename}: cannot be read: {error.strerror}. Run the same command again"
                    " when the store answers",
                ) from error
            if isinstance(error, StoreError):
                raise UnreadableError(
                    "MW-CHECKPOINT-040", f"{error.filename}: cannot be read: {error.strerror}"
                ) from error
            if pause_s is None:
                raise UnreadableError(
                    "MW-CHECKPOINT-004",
                    f"{error.filename or path}: cannot be read: {error.strerror} (errno"
                    f" {error.errno}), tried {len(READ_PAUSES_S) + 1} times. Its bytes may be"
                    " sound: repair the file system and run the same command again; or move its"
                    " directory away to resume from the checkpoint before",
                ) from error
            time.sleep(pause_s)
    raise AssertionError


def regular_size(path: Path) -> int | None:
    """Return the size in bytes of a regular file; None if it is missing or something else,
    such as a symlink.

    Raises:
        UnreadableError: The file system cannot be read.
    """

    def read() -> int | None:
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    return retried(read, path)


def delete(path: Path) -> None:
    """Delete a file, or a directory with its contents.
    Of a symbolic link only the link is deleted.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def delete_leftovers(paths: Iterable[Path], warn: Warn) -> None:
    """Delete files of dead attempts. An error is only a warning: another user's file,
    or one still open on NFS.
    """
    for path in paths:
        try:
            delete(path)
        except OSError as error:
            warn(
                f"files of a dead save cannot be removed: {error.filename or path}:"
                f" {error.strerror}"
            )


def remove_directory(path: Path) -> None:
    """Delete a directory so that readers never see half of it: rename it aside,
    then remove file by file.
    """
    aside = path.with_name(f".tmp-{path.name}{DELETED_SUFFIX}")
    rename_synced(path, aside)
    delete(aside)
