"""Places that a command writes to: refused before long work where that can be seen, and with one message after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.errors import ConfigError


def check_place(out: Path | None, word: str, *, folder: bool, example: str) -> None:
    """Refuse what cannot be written. ``folder``: whether it is to be one, or a file; ``example``: the name of one.

    Raises:
        ConfigError: it is the other one, lies below a file, or where nothing may be written.
    """
    if out is None:
        return
    if out.exists() and out.is_dir() != folder:
        there, wanted = ("a file", "folder") if folder else ("a folder", "file")
        near = out.with_name(f"{out.stem}-{example}") if folder else out / example
        raise ConfigError(f"{word} {out}: there is {there} of that name; name a {wanted}, such as {near}")
    below = next((each for each in (out, *out.absolute().parents) if each.exists()), Path("/"))
    if below != out and not below.is_dir():
        raise ConfigError(f"{word} {out}: {below} is a file, and nothing can lie below it: choose another place")
    if not os.access(below, os.W_OK):
        raise ConfigError(f"{word} {out}: {below} is not ours to write: choose another place")


@contextmanager
def writing(out: Path, word: str) -> Iterator[None]:
    """Within: what cannot be written is said in one message.

    Raises:
        ConfigError: with the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{word} {out}: cannot be written ({error.strerror}): choose another place") from error
