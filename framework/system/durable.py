"""Files that survive a power cut: bytes and names are on the disk when these functions return. No torch.

A file's bytes survive after an fsync of the file, its name after an fsync of its directory. A rename without the first
can leave an empty file under the new name (ext4, XFS), one without the second the old name.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Flush the bytes of a file to the disk, whoever wrote them."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk: a synced file whose name is not is lost all the same."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_synced(path: Path, data: bytes) -> None:
    """Write a file, or replace it, whole or not at all."""
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def append_synced(path: Path, data: bytes) -> None:
    """Append to a file, which is made if need be."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def make_directory_synced(path: Path) -> None:
    """Make a directory and those above it that are missing; each new name is on the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_directory(each.parent)
