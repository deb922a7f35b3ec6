"""Where a conversion writes: a temporary directory beside the one asked for, which appears whole by one rename."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.checkpoint.files import delete, explained, sync_directory
from framework.errors import CheckpointError

OnBytes = Callable[[int, int], None]
"""Told of the bytes that are done, and of all of them."""


def keep_quiet(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""


def named(out: Path) -> Path:
    """``out`` with a name of its own, also where it was given as ``.``; it is new, or empty.

    Raises:
        CheckpointError: something is there.
    """
    out = out.resolve() if out.name in ("", "..") else out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} is {'not empty' if out.is_dir() else 'a file'}: name a directory that is new, or an empty one"
        )
    return out


@contextmanager
def published(out: Path, num_bytes: int) -> Iterator[Path]:
    """Within: a temporary directory for ``num_bytes``, which is ``out`` after the block, all of it on the disk; or gone
    if that fails.

    What a conversion to the same name has left that was killed is removed first.

    Raises:
        CheckpointError: it does not fit on the disk, or the operating system refuses something.
    """
    with explained(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        for leftover in out.parent.glob(f".tmp-{out.name}-*"):
            delete(leftover)
        free = shutil.disk_usage(out.parent)
        if free.total > 0 and free.free < num_bytes:
            raise CheckpointError(
                f"{out.parent} has {free.free:,} bytes free, and {num_bytes:,} are to be written: free "
                f"{num_bytes - free.free:,} bytes there, or name a directory on another disk"
            )
        temporary = out.parent / f".tmp-{out.name}-{secrets.token_hex(4)}"
        temporary.mkdir()
    try:
        with explained(temporary):
            yield temporary
            _sync(temporary)
            if out.is_dir():
                out.rmdir()  # empty, as `named` has seen
            temporary.rename(out)
            sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(directory: Path) -> None:
    """Every file in a directory and below, and their names."""
    for place, _, names in os.walk(directory):
        for name in names:
            with (Path(place) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(place))
