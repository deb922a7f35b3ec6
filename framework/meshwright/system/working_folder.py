"""Working folders: folders whose name meshwright chose, not the user,
such as ``.NAME.preparing`` and compile caches.

Their names can be guessed, and they often lie where others may write. A link in place of one, or in
it, leads to files of somebody else, which would be written, truncated or deleted. A folder of
another user may be replaced at any moment. A folder that the user names may be a link. No torch.

    run directory          its files and folders: :func:`meshwright.run.files.check_run_files`
    data prepare           :func:`make_working_folder`, and everything in it
    compile caches         :func:`why_not_own`
    launcher's /tmp        a fresh name by mkdtemp; :func:`why_not_own` before leftovers are removed
    offload                files without a name
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import UserError
from meshwright.system.bounded import kind_of


def why_not_own(path: Path, *, is_folder: bool = True) -> str | None:
    """Return why a path cannot be meshwright's own working folder, or file; None: it is,
    or nothing is there.

    The owner may be this user or that of the folder above, who may replace it anyway. (On NFS with
    root squashing what root makes has another owner than root.)
    """
    try:
        found, above = path.lstat(), path.parent.stat()
    except OSError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link, which leads to files of something else"
    if is_folder and not stat.S_ISDIR(found.st_mode):
        return (
            f"is {'a file' if stat.S_ISREG(found.st_mode) else kind_of(found.st_mode)}, and a"
            " folder belongs there"
        )
    if not is_folder and not stat.S_ISREG(found.st_mode):
        return (
            f"is {'a folder' if stat.S_ISDIR(found.st_mode) else kind_of(found.st_mode)}, and a"
            " file belongs there"
        )
    if not is_folder and found.st_nlink > 1:
        return "has another name elsewhere (a hard link), under which something else would change"
    if found.st_uid not in (os.geteuid(), above.st_uid):
        return f"belongs to another user (uid {found.st_uid}), who may change what is in it"
    return None


def make_working_folder(folder: Path, kind: type[UserError]) -> None:
    """Make a working folder, or check that the one that is there, and everything in it, is its own.

    Raises:
        UserError: an error of class ``kind``; names the first path that is not.
        OSError: it cannot be made.
    """
    if not os.path.lexists(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path, reason in _foreign(folder):
        raise kind(
            "MW-SYSTEM-009",
            f"{path} {reason}. meshwright makes this folder itself, and writes and deletes in it:"
            " move it away, or choose another place",
        )


def _foreign(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield what is not the working folder's own, with the reason: the folder,
    or something at any depth in it.
    """
    reason = why_not_own(folder)
    if reason is not None:
        yield folder, reason
        return
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            reason = why_not_own(path, is_folder=stat.S_ISDIR(path.lstat().st_mode))
            if reason is not None:
                yield path, reason
