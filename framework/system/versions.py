"""Versions of the software at work."""

from __future__ import annotations

import platform
from importlib import metadata


def own_version() -> str:
    """Return the installed version of meshwright."""
    return _version("meshwright")


def versions() -> dict[str, str]:
    """Return the versions of meshwright, Python and torch, as checkpoints record them. Does not import torch."""
    return {"meshwright": own_version(), "python": platform.python_version(), "torch": _version("torch")}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
