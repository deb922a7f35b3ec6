"""Where a conversion writes: a temporary directory beside the one asked for, which appears whole by one rename."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.checkpoint.files import delete, explained
from meshwright.errors import CheckpointError
from meshwright.system.bounded import real_path
from meshwright.system.durable import sync_directory

OnBytes = Callable[[int, int], None]
"""Told of the bytes that are done, and of all of them."""


def keep_quiet(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""


def named(out: Path) -> Path:
    """``out`` with a name of its own, also where it was given as ``.`` or is a link; it is new, or empty.

    Raises:
        CheckpointError: something is there, or a file is where a directory would have to be.
    """
    out = real_path(out) if out.name in ("", "..") or out.is_symlink() else out
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise CheckpointError(f"{out} cannot be: {above} is a file. Name a directory that is new, or an empty one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} is {'not empty' if out.is_dir() else 'a file'}: name a directory that is new, or an empty one"
        )
    return out


@contextmanager
def published(out: Path, num_bytes: int) -> Iterator[Path]:
    """Within: a temporary directory for ``num_bytes``, which is ``out`` after the block, all of it on the disk; or gone
    if that fails.

    What a conversion to the same name has left that was killed is removed first; what one is at work in is locked.

    Raises:
        CheckpointError: it does not fit on the disk, or the operating system refuses something.
    """
    with explained(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        free = shutil.disk_usage(out.parent)
        if free.total > 0 and free.free < num_bytes:
            raise CheckpointError(
                f"{out.parent} has {free.free:,} bytes free, and {num_bytes:,} are to be written: free "
                f"{num_bytes - free.free:,} bytes there, or name a directory on another disk"
            )
        temporary = out.parent / f".tmp-{out.name}-{secrets.token_hex(4)}"
        temporary.mkdir()
    try:
        with explained(temporary), _locked(temporary):
            yield temporary
            _sync(temporary)
            if out.is_dir():
                out.rmdir()  # empty, as `named` has seen
            temporary.rename(out)
            sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_leftovers(out: Path) -> None:
    """The temporary directories of this name, and of no other that begins so, whose conversion is gone."""
    name = re.compile(rf"\.tmp-{re.escape(out.name)}-[0-9a-f]{{8}}")
    for path in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        with _locked(path) as is_ours:
            if is_ours:
                delete(path)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the lock of a directory, which goes with the process; False: another holds it, or nobody can here."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone meanwhile, or no directory
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except OSError:  # held; or a file system without locks, where a leftover stays
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(descriptor)


def _sync(directory: Path) -> None:
    """Every file in a directory and below, and their names."""
    for place, _, names in os.walk(directory):
        for name in names:
            with (Path(place) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(place))
