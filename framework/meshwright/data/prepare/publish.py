"""Atomic publication of a folder: fsync, then one rename, so that it is complete or absent."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.system.atomic import rename_synced, sync_tree

OLD = ".old"
"""Suffix of the folder that a publication replaces."""


def publish(aside: Path, out: Path) -> None:
    """Flush ``aside`` and rename it to ``out``.
    A non-empty ``out`` is renamed first and deleted last.
    """
    sync_tree(aside)
    if out.is_dir() and any(out.iterdir()):
        old = aside.with_name(aside.name + OLD)
        _remove(old)  # left by a call that was killed
        out.rename(old)
        rename_synced(aside, out)
        _remove(old)
    else:
        rename_synced(aside, out)


def _remove(old: Path) -> None:
    """Remove a folder, or a link that the user named; what it leads to stays."""
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)
