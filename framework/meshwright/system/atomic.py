"""Atomic and durable writes: after a kill or a power cut a file has its old content or its new one.
No torch.

A file's bytes survive a power cut after an fsync of the file, its name after an fsync of its
directory. A rename without the first can leave an empty file under the new name (ext4, XFS), one
without the second the old name.

An output that a user names with --out is written by the same rename (`writing`, `write_out`). A
path that cannot be written is refused before any work (`check_place`, which the command line calls
for each command with --out).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.system.bounded import kind_of, real_path
from meshwright.system.store import check_local

NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)
"""errno values of a directory that this process cannot have made,
or whose file system has no fsync of directories.
"""


def sync(path: Path) -> None:
    """Sync a file's bytes, or a directory's names, to disk (fsync). Blocks.
    Also bytes that other processes wrote.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_with_folders(files: Iterable[Path]) -> Iterator[tuple[Path, OSError]]:
    """Sync files, then every directory above them on their file system, each once;
    yield the paths that fail.

    A missing file is left out. The directories count because a process may have made one and died
    before it synced the name, after which no other process makes it again.
    """
    folders: dict[Path, None] = {}
    for file in files:
        try:
            sync(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield file, error
        with contextlib.suppress(OSError):  # removed meanwhile
            folders |= dict.fromkeys(_folders_above(file))
    for folder in folders:
        try:
            sync(folder)
        except OSError as error:
            if error.errno not in NOT_OURS:
                yield folder, error


def _folders_above(file: Path) -> Iterator[Path]:
    """Yield the directories above a file, up to the root of its file system."""
    device = file.lstat().st_dev
    for folder in file.absolute().parents:
        if folder.stat().st_dev != device:
            return
        yield folder


def sync_tree(directory: Path) -> None:
    """Flush every file and every directory of a tree to the disk."""
    for place, _, names in os.walk(directory):
        for name in names:
            sync(Path(place) / name)
        sync(Path(place))


def rename_synced(source: Path, target: Path) -> None:
    """Rename a file or directory, then fsync the directory of ``target``. A file there is replaced.

    An NFS client repeats a request whose answer was lost. The server may refuse it then, because
    the source is gone.
    """
    moved = source.stat()
    try:
        source.rename(target)
    except FileNotFoundError:
        if not (target.exists() and os.path.samestat(moved, target.stat())):
            raise
    sync(target.parent)


def _name_aside(name: str) -> str:
    """Return the name of the temporary file beside a file that is being written."""
    return f".part-{name}"


@contextmanager
def replacing(path: Path, *, is_durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, with the same suffix.
    After the block it is renamed to ``path``.

    An error in the block leaves ``path`` as it was, and removes the temporary file.

    Args:
        path: The file to write or replace.
        is_durable: Fsync the file before the rename and the directory after it.
    """
    aside = path.with_name(_name_aside(path.name))
    aside.unlink(missing_ok=True)  # of a dead process; a link there would be written through
    try:
        yield aside
        if is_durable:
            sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if is_durable:
        sync(path.parent)


def write_atomic(path: Path, content: str | bytes, *, is_durable: bool = True) -> None:
    """Write or replace a file atomically; text as UTF-8. ``is_durable``:
    fsync it and its directory as well.
    """
    with replacing(path, is_durable=is_durable) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_in(directory: int, name: str, text: str) -> None:
    """Write or replace a file atomically, but not durably,
    in a directory given by its open descriptor.

    The file goes where that directory is now, whatever its old path names.
    """
    aside = _name_aside(name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside, dir_fd=directory)  # as in `replacing`
    descriptor = os.open(
        aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory
    )
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(aside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(aside, dir_fd=directory)
        raise


def append_synced(path: Path, data: bytes) -> None:
    """Append to a file, created if missing, then fsync it and its directory."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def make_directory_synced(path: Path) -> None:
    """Make a directory and its missing parents, then fsync each new name."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync(each.parent)


def check_place(out: Path, *, folder: bool, example: str, option: str = "--out") -> None:
    """Check that ``out`` can be written. ``folder``: it must be a folder, else a file.

    ``example``, a name for advice, and ``option``, the option that names ``out``, are for the
    messages.

    Raises:
        ConfigError: it has the wrong type, lies below a file, or is not writable.
        OSError: its name is too long.
    """
    check_local(out, option)
    if out.exists() and out.is_dir() != folder:
        there, wanted = ("a file", "folder") if folder else ("a folder", "file")
        near = out.with_name(f"{out.stem}-{example}") if folder else out / example
        raise ConfigError(
            "MW-SYSTEM-003",
            f"{option} {out}: there is {there} of that name; name a {wanted}, such as {near}",
        )
    if out.exists() and not out.is_dir() and not out.is_file():
        _check_special(out, out.with_name(f"{out.stem}-{example}"), option)
        return
    target = real_path(out)
    below = next(each for each in (target, *target.parents) if each.exists())
    if below != target and not below.is_dir():
        raise ConfigError(
            "MW-SYSTEM-004",
            f"{option} {out}: {below} is a file, and nothing can lie below it: choose another"
            " place",
        )
    for name in (*target.relative_to(below).parts, _name_aside(target.name)):
        (below / name).exists()  # raises if the name is too long
    place = below if below.is_dir() else below.parent  # a file is replaced by a new one beside it
    try:
        if not os.access(below, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        # root has access to places where no file can be made, as in /proc
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ConfigError(
            "MW-SYSTEM-005",
            f"{option} {out}: {below} cannot be written to ({error.strerror}): choose another"
            " place",
        ) from None


def _check_special(out: Path, near: Path, option: str) -> None:
    """Check a path that is no regular file. Pipes that this process holds, as in ``--out >(cat)``,
    are written to.

    A FIFO with a name is refused: opening it blocks until there is a reader. So is a socket, which
    cannot be opened.

    Raises:
        ConfigError: it is one of these.
    """
    mode = out.stat().st_mode
    # /dev/fd/63 leads to /proc/12/fd/pipe:[345], which is no path
    has_name = real_path(out).exists()
    if has_name and not stat.S_ISCHR(mode):
        raise ConfigError(
            "MW-SYSTEM-010",
            f"{option} {out}: there is {kind_of(mode)} of that name; name a file, such as {near},"
            " or /dev/stdout",
        )


def leads_elsewhere(file: Path) -> Path | None:
    """Return the target of a link to a file of another name outside of its folder; None:
    it is no such link.

    The cache of Hugging Face's hub has ``snapshots/REVISION/FILE -> ../../blobs/HASH``.
    """
    home, end = real_path(file.parent), real_path(file)
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if end.name != file.name and not any(end.is_relative_to(each) for each in homes):
        return end
    return None


def check_inside(out: Path, directory: Path) -> None:
    """Check that ``out``, a path in a directory that may be somebody else's,
    is and follows no link out of it.

    Raises:
        ConfigError: it leads elsewhere.
    """
    if real_path(out) != real_path(directory) / out.relative_to(directory):
        raise ConfigError(
            "MW-SYSTEM-007",
            f"{out} is a link, and would be written to {real_path(out)}: remove it, or name an"
            " --out",
        )


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Yield a path of the same suffix to write to, renamed to ``out`` after the block.
    The folder is made.

    An error leaves ``out`` as it was. A path that is no regular file, such as /dev/stdout, is
    written to directly.

    Raises:
        ConfigError: it cannot be written, with the system's reason.
    """
    try:
        if out.exists() and not out.is_file():
            yield out
            return
        file = real_path(out)  # the target of a link
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, is_durable=False) as aside:
            yield aside
    except OSError as error:
        raise ConfigError(
            "MW-SYSTEM-006",
            f"--out {out}: cannot be written ({error.strerror}): choose another place",
        ) from error


def write_out(out: Path, text: str) -> None:
    """Write a text file.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing(out) as path:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
