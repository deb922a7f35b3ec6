"""Line of code from which an operation came."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

import meshwright_plan.dryrun
from meshwright.system.packages import TRAINER

HIDDEN = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    *meshwright_plan.dryrun.__path__,
    str(TRAINER / "model" / "meter"),
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
    return f"{file.relative_to(TRAINER) if file.is_relative_to(TRAINER) else file.name}:{frame.f_lineno}"
