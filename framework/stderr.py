"""Words for people on stderr, which may be a file on a disk that is full, or a pipe that nobody reads any more."""

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
