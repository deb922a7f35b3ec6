"""Processes of this machine: existence by process id, and immediate exit."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

from meshwright.errors import UserError
from meshwright.terminal.output import tell

GiveUp = Callable[[UserError], None]
"""Handler that ends this process, whose main thread may be stuck. Must not return; called in another thread."""


def leave(exit_code: int, after_s: float = 0.0) -> None:
    """End this process without the interpreter's shutdown, which may wait for threads and peers that are gone.

    Flushes stdout and stderr, then waits ``after_s`` seconds.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):  # closed from the start, or its reader has gone
            stream.flush()
    time.sleep(after_s)
    os._exit(exit_code)


def end_process(error: UserError) -> None:
    """Print one message and exit at once: the default of :data:`GiveUp`."""
    tell(f"meshwright: error: {error}")
    leave(error.exit_code)


def is_alive(pid: int) -> bool:
    """Return True if this machine has a process of that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
