"""Temporary directory of a launcher, and removal of directories
that killed launchers have left behind.

A process killed with -9 removes nothing. Each launcher holds a lock on its directory while it
lives, so one with a free lock is abandoned. (A process id would prove nothing: two containers may
share /tmp.) systemd-tmpfiles, which deletes old files of /tmp, leaves a locked directory alone.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.system.process import FileLock
from meshwright.system.working_folder import why_not_own

PREFIX = "meshwright-launcher-"
PATTERN = re.compile(re.escape(PREFIX) + r"\w+")
YOUNG_S = 60
"""Age in seconds below which a launcher of an earlier version may still be about to lock its directory;
one in memory never is, and holds much of it.
"""
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
MAX_PATH_LENGTH = 60
"""Bytes of a directory's path that leave room for the name of a Unix socket;
the kernel allows 107 in all.
"""

MEMORY = Path("/dev/shm")
"""File system in memory."""

_own: dict[tuple[int, Path], tuple[Path, FileLock]] = {}


def own_directory() -> Path:
    """Return this process's temporary directory, mode 0700; created at the first call,
    removed at exit.

    The socket of multiprocessing's fork server goes there too.
    """
    path = _own_directory(_temporary_directory())
    # multiprocessing.util.get_temp_dir puts its sockets there, instead of a directory of its own
    multiprocessing.process.current_process()._config.setdefault("tempdir", str(path))  # type: ignore[attr-defined]
    return path


def memory_directory() -> Path:
    """Return this process's directory in the file system in memory, made and removed as
    :func:`own_directory`. Raises OSError: there is no such file system.
    """
    return _own_directory(MEMORY)


def check_mirror_space(needed: int) -> None:
    """Refuse a mirror that does not fit into memory.

    Raises:
        ConfigError: the bytes that it needs, and those that are free.
    """
    with contextlib.suppress(OSError):  # memory_directory reports it
        free = shutil.disk_usage(MEMORY).free
        if free < needed:
            raise ConfigError(
                "MW-LAUNCH-116",
                f"watch.mirror = true keeps the last two steps in {MEMORY}, on several nodes those of the"
                f" node before too: {needed:,} bytes, and {free:,} are free there. Enlarge it (a"
                " container's --shm-size, mount -o remount,size=...), or leave watch.mirror out",
            )


def _own_directory(place: Path) -> Path:
    pid = os.getpid()
    if (pid, place) not in _own:
        # locked before it has a name by which others look for abandoned ones
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
        lock = FileLock(made, DIRECTORY_FLAGS)
        lock.take()
        path = made.rename(made.with_name(made.name.removeprefix(".")))
        _own[pid, place] = path, lock
        atexit.register(_remove_own, pid, path)
    return _own[pid, place][0]


def _temporary_directory() -> Path:
    """Return the user's temporary directory, or /tmp if its path is too long for sockets."""
    path = Path(tempfile.gettempdir())
    return path if len(os.fsencode(path)) <= MAX_PATH_LENGTH else Path("/tmp")


def _remove_own(pid: int, path: Path) -> None:
    if os.getpid() == pid:  # a forked child must leave its parent's directory alone
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove this user's launcher directories whose lock is free; never another user's,
    never through a link.
    """
    places = (_temporary_directory(), MEMORY)
    for entry in (entry for place in places for entry in place.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            status = entry.lstat()
            is_own = why_not_own(entry) is None and status.st_uid == os.getuid()
            if is_own and PATTERN.fullmatch(entry.name) and _is_abandoned(entry, status.st_mtime):
                shutil.rmtree(entry, ignore_errors=True)


def _is_abandoned(directory: Path, modified_s: float) -> bool:
    is_old = time.time() - modified_s > YOUNG_S or directory.parent == MEMORY
    with FileLock(directory, DIRECTORY_FLAGS) as lock:
        return is_old and lock.take()
