"""Output directory of a conversion: written under a temporary name beside the target,
then published by one rename.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.checkpoint.files import as_checkpoint_error, delete
from meshwright.errors import CheckpointError
from meshwright.run.directory import is_run
from meshwright.system.atomic import make_directory_synced, rename_synced, sync_tree
from meshwright.system.bounded import real_path
from meshwright.system.process import FileLock

OnBytes = Callable[[int, int], None]
"""Progress callback: (bytes written so far, total bytes)."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore the progress; the default callback."""


def check_output_directory(out: Path) -> Path:
    """Resolve ``out`` to a path with a name (not ``.``, not a link),
    and check that it is new or empty.

    Raises:
        CheckpointError: ``out`` is a file, is not empty, or is among the checkpoints of a run; or a
            parent is a file.
    """
    out = real_path(out) if out.name in ("", "..") or out.is_symlink() else out
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise CheckpointError(
            "MW-INTEROP-041",
            f"{out} cannot be created: {above} is a file. Name a directory that is new, or an"
            " empty one",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            "MW-INTEROP-042",
            f"{out} is {'not empty' if out.is_dir() else 'a file'}: name a directory that is new,"
            " or an empty one",
        )
    folder = real_path(out.parent)
    if folder.name == "checkpoints" and is_run(folder.parent):
        raise CheckpointError(
            "MW-INTEROP-096",
            f"{out}: a directory in the checkpoints of a run, which would count as one that is"
            f" damaged: name a directory outside of {folder.parent}",
        )
    return out


@contextmanager
def published_directory(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary directory; after the block, fsync it and rename it to ``out``.
    On failure it is deleted.

    Temporary directories that killed conversions to the same name left behind are removed first. A
    directory that a running conversion writes to is locked, and stays.

    Args:
        out: the target, new or empty.
        num_bytes: bytes that will be written; checked against the free space of the disk.

    Raises:
        CheckpointError: the bytes do not fit on the disk, or a system call fails.
    """
    with as_checkpoint_error(out.parent):
        make_directory_synced(out.parent)
        _remove_leftovers(out)
        free = shutil.disk_usage(out.parent)
        if free.total > 0 and free.free < num_bytes:
            raise CheckpointError(
                "MW-INTEROP-043",
                f"{out.parent} has {free.free:,} bytes free, and {num_bytes:,} are to be written:"
                f" free {num_bytes - free.free:,} bytes there, or name a directory on another disk",
            )
        temporary = out.parent / f".tmp-{out.name}-{secrets.token_hex(4)}"
        temporary.mkdir()
    try:
        with as_checkpoint_error(temporary), _locked(temporary):
            yield temporary
            sync_tree(temporary)
            if out.is_dir():
                out.rmdir()  # empty: `check_output_directory` has checked it
            rename_synced(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_leftovers(out: Path) -> None:
    """Delete temporary directories of exactly this name (not of longer names)
    whose conversion no longer runs.
    """
    name = re.compile(rf"\.tmp-{re.escape(out.name)}-[0-9a-f]{{8}}")
    for path in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        with _locked(path) as is_ours:
            if is_ours:
                delete(path)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the flock of a directory, which ends with the process.

    Yields False if another process holds it, if the directory is gone, or if the file system has no
    locks.
    """
    with contextlib.ExitStack() as open_locks:
        is_ours = False
        # removed meanwhile, no directory, or a file system without locks
        with contextlib.suppress(OSError):
            is_ours = open_locks.enter_context(
                FileLock(directory, os.O_RDONLY | os.O_DIRECTORY)
            ).take()
        yield is_ours
