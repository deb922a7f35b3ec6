"""Under a name there is a whole folder or none: written aside, flushed to the disk, published by a rename."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def publish(aside: Path, out: Path) -> None:
    """Flush and rename. No folder can be renamed over a full one: what is there is moved away first, deleted last."""
    for path in aside.iterdir():
        flush(path)
    flush(aside)
    if out.is_dir() and any(out.iterdir()):
        old = aside.with_name(aside.name + OLD)
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        aside.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(out)
    flush(out.parent)


OLD = ".old"
"""The end of the name of what was there before."""


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
