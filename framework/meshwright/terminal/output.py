"""Output for people on stdout and stderr. Either may be a full disk or a closed pipe."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

Warn = Callable[[str], None]
"""Receiver of warnings."""

_CONTROLS = re.compile(
    # C0, C1, bidirectional marks, lone surrogates
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return text with control characters written out (``\\x1b``), but for newlines and tabs.

    Names of runs, tensors and files come from anywhere; a terminal would obey the escape sequences
    in them.
    """
    return _CONTROLS.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return f"\\x{ord(character):02x}" if character < "\x80" else f"\\u{ord(character):04x}"


def make_printable() -> None:
    """Make stdout and stderr of this process print any text,
    escaped where their encoding has no character for it.

    The encoding is the locale's: ASCII in the C locale without Python's UTF-8 mode, Latin-1 in
    others. Every process calls it at its start: a picture or a name in a message must not end a
    run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_printable(stream):
            stream.reconfigure(errors="backslashreplace")


def _is_printable(stream: io.TextIOWrapper) -> bool:
    """Return True if a stream prints any text:
    in UTF-8 only bytes of file names need their error handler.
    """
    is_utf8 = stream.encoding.lower().replace("-", "").replace("_", "") == "utf8"
    return stream.errors == "backslashreplace" or (is_utf8 and stream.errors == "surrogateescape")


def _encodable(stream: TextIO, text: str) -> str:
    """Return text with characters that the stream's encoding lacks written out (``\\u2502``)."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _write(stream: TextIO, text: str, *, flush: bool = True) -> None:
    """Write in one call: ``print`` writes the line feed separately,
    and another thread's line may come between.
    """
    try:
        stream.write(text)
    except UnicodeEncodeError:
        # a stream of the caller's own, in a process that has not called make_printable
        stream.write(_encodable(stream, text))
    if flush:
        stream.flush()


def put(*values: object, end: str = "\n", flush: bool = False) -> None:
    """Print the result of a command to stdout, control characters escaped. Raises OSError,
    as print does.
    """
    if sys.stdout is not None:
        _write(sys.stdout, visible(" ".join(map(str, values))) + end, flush=flush)


def tell(text: str) -> None:
    """Print a line to stderr. A failed write is ignored, so that it never ends a run."""
    try:
        _write(sys.stderr, visible(text) + "\n")
    except (OSError, ValueError, AttributeError):
        # text left in the buffer would change the exit code
        with contextlib.suppress(OSError, ValueError):
            sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def print_lines(text: str) -> None:
    """Print lines to stdout. A closed pipe or terminal (`| head`) is ignored,
    and later output is dropped.
    """
    try:
        if sys.stdout is not None:
            _write(sys.stdout, visible(text) + "\n")
    except OSError:
        sys.stdout = None  # print and the console then write nothing


def abridge(items: Sequence[object], most: int = 8) -> str:
    """Format items as ``2, 3``; of more than ``most`` the first ones,
    and the number of the others.
    """
    return f"{', '.join(map(str, items[:most]))}{f' and {len(items) - most} more' if len(items) > most else ''}"


def print_warning(message: str) -> None:
    """Print a warning to stderr: the default receiver of warnings."""
    tell(f"warning: {message}")
