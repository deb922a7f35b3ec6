"""Files that survive a power cut: bytes and names are on the disk when these functions return. No torch.

A file's bytes survive after an fsync of the file, its name after an fsync of its directory. A rename without the first
can leave an empty file under the new name (ext4, XFS), one without the second the old name.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Flush the bytes of a file to the disk, including those that other processes wrote."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk. A synced file is lost if its name is not synced."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_synced(path: Path, data: bytes) -> None:
    """Write or replace a file atomically, then sync it and its directory."""
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def append_synced(path: Path, data: bytes) -> None:
    """Append to a file, created if missing, then sync it and its directory."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def make_directory_synced(path: Path) -> None:
    """Make a directory and its missing parents, then sync each new name."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_directory(each.parent)
