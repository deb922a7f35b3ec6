"""Which versions are at work."""

from __future__ import annotations

import platform
from importlib import metadata


def own_version() -> str:
    """Of meshwright."""
    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Of what writes a checkpoint, or runs on a node."""
    import torch  # `meshwright --version` does without

    return {"meshwright": own_version(), "python": platform.python_version(), "torch": str(torch.__version__)}
