"""Line of code from which an operation came."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

PACKAGE = Path(__file__).parents[3]
HIDDEN = (
    str(Path(torch.__file__).parent),
    str(PACKAGE / "tools" / "dryrun"),
    str(PACKAGE / "model" / "meter"),
    "<",
)
"""Prefixes of the file names of frames that :func:`call_site` skips."""


def call_site() -> str:
    """Return file:line of the innermost code that is neither torch's nor a recorder's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(HIDDEN):
        frame = frame.f_back
    if frame is None:
        return "autograd"
    file = Path(frame.f_code.co_filename)
    return f"{file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file.name}:{frame.f_lineno}"
