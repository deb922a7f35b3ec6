"""The files below a folder: none is left out in silence."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.errors import DataError
from meshwright.system.bounded import real_path


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted by path. Hidden ones, and those in hidden folders, are left out.

    Links are followed, except those that lead back to a folder that contains them.

    Raises:
        DataError: a folder that cannot be read, a link that leads nowhere.
    """
    found: list[Path] = []
    for above, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        place = Path(above)
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(place / name)]
        for path in (place / name for name in names if not name.startswith(".")):
            if path.is_file():
                found.append(path)
            elif path.is_symlink():
                raise DataError(
                    "MW-DATA-045",
                    f"{path} is a link to {path.readlink()}, where no file is: what it was to hold would be missing. "
                    f"Mend the link or remove it",
                )
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise DataError("MW-DATA-046", f"cannot read the folder {error.filename}: {error.strerror or error}") from error


def _leads_back(folder: Path) -> bool:
    return folder.is_symlink() and real_path(folder.parent).is_relative_to(real_path(folder))
