"""Line of the user's code that led to the current operation. No torch."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

from meshwright.system.packages import MODELS_PACKAGE, is_own_package

CALLER = "torch.nn.modules.module"
"""Module whose frames call every layer."""


def user_line() -> str:
    """Return "FILE:LINE, `CODE`" of the call in a layer's code that led to the current operation;
    "": there is none.

    It is the innermost one outside of torch, or in torch.nn for a layer that is all torch's.
    """
    calls = _layer_calls(
        _beneath_own_code(sys._getframe(1))
    )  # what watches the operation is left out
    outside = [call for call in calls if not _is_torch(call)]
    of_torch = [
        call
        for call in calls
        if _module_of(call).startswith("torch.nn.") and _module_of(call) != CALLER
    ]
    for call in outside or of_torch:
        file, line = call.f_code.co_filename, call.f_lineno
        return f"{file}:{line}, `{linecache.getline(file, line).strip()}`"
    return ""


def _layer_calls(frame: FrameType | None) -> list[FrameType]:
    """Return the frames from ``frame`` outwards that are a layer's, or torch's below it."""
    calls: list[FrameType] = []
    while frame is not None:
        if is_own_code(_module_of(frame)):
            frame = _beneath_own_code(frame)
            # it runs the layer; else it is around the forward of a module
            if frame is None or not _is_torch(frame):
                break
        calls.append(frame)
        frame = frame.f_back
    return calls


def _beneath_own_code(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not of this package, from ``frame`` outwards."""
    while frame is not None and is_own_code(_module_of(frame)):
        frame = frame.f_back
    return frame


def _is_torch(frame: FrameType) -> bool:
    return _module_of(frame).partition(".")[0] == "torch"


def is_own_code(module: str) -> bool:
    """Return whether a module, by its name, is one of this package, and no model."""
    return is_own_package(module) and not module.startswith(f"{MODELS_PACKAGE}.")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
