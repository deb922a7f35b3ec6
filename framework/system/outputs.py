"""Outputs of --out: unwritable paths are refused before long work where possible, else with one message after it.
Files are written atomically. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.system.bounded import real_path


def check_place(out: Path | None, *, folder: bool, example: str) -> None:
    """Check that ``out`` can be written. ``folder``: it must be a folder, else a file; ``example``: a name for advice.

    Raises:
        ConfigError: it has the wrong type, lies below a file, or is not writable.
    """
    if out is None:
        return
    if out.exists() and out.is_dir() != folder:
        there, wanted = ("a file", "folder") if folder else ("a folder", "file")
        near = out.with_name(f"{out.stem}-{example}") if folder else out / example
        raise ConfigError(
            "MW-SYSTEM-003", f"--out {out}: there is {there} of that name; name a {wanted}, such as {near}"
        )
    below = next((each for each in (out, *out.absolute().parents) if each.exists()), Path("/"))
    if below != out and not below.is_dir():
        raise ConfigError(
            "MW-SYSTEM-004", f"--out {out}: {below} is a file, and nothing can lie below it: choose another place"
        )
    if not os.access(below, os.W_OK):
        raise ConfigError("MW-SYSTEM-005", f"--out {out}: {below} is not ours to write: choose another place")


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Yield a path of the same suffix to write to, renamed to ``out`` after the block. The folder is made.

    An error leaves ``out`` as it was. Other than a regular file, such as /dev/stdout, is written to directly.

    Raises:
        ConfigError: it cannot be written, with the system's reason.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            yield out
            return
        file = real_path(out)  # of a link what it leads to
        aside = file.with_name(f".part-{file.name}")
        try:
            yield aside
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            "MW-SYSTEM-006", f"--out {out}: cannot be written ({error.strerror}): choose another place"
        ) from error


def write_out(out: Path, text: str) -> None:
    """Write a text file.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing(out) as path:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
