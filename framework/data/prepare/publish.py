"""Under a name there is a whole folder or none: written aside, flushed to the disk, published by a rename."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.system.atomic import sync, sync_tree


def publish(aside: Path, out: Path) -> None:
    """Flush and rename. No folder can be renamed over a full one: what is there is moved away first, deleted last."""
    sync_tree(aside)
    if out.is_dir() and any(out.iterdir()):
        old = aside.with_name(aside.name + OLD)
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        aside.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(out)
    sync(out.parent)


OLD = ".old"
"""The end of the name of what was there before."""
