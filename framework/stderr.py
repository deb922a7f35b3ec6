"""Words for people on stdout and stderr, which may be a file on a disk that is full, or a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Print a line. That it cannot be printed is a reason for nothing: least of all for a run to end."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(OSError, ValueError):  # what is stuck in its buffer would spoil the exit code later
            sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def say(text: str) -> None:
    """Print lines on stdout. A reader that has gone (`| head`, a terminal that was closed) is no reason to end."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = None  # for print and the console: nobody listens
