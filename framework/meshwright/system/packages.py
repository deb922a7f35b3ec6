"""Packages of this distribution, and its files that are no code: configs/, examples/, docs/.
No torch.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1]
OWN_PACKAGES = (
    "meshwright",
    "meshwright_models",
    "meshwright_launch",
    "meshwright_plan",
    "meshwright_interop",
)
MODELS_PACKAGE = "meshwright_models"


def is_own_package(module: str) -> bool:
    """Return whether a module, or a function ``module:function``, is one of this distribution."""
    return re.split("[.:]", module, maxsplit=1)[0] in OWN_PACKAGES


def own_code() -> tuple[str, ...]:
    """Return the folders of the imported packages of this distribution, without its models,
    each with a final slash.
    """
    packages = [
        sys.modules[name] for name in OWN_PACKAGES if name in sys.modules and name != MODELS_PACKAGE
    ]
    return tuple(f"{folder}/" for package in packages for folder in package.__path__)


def entries_of(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; of two with one name this distribution's,
    or the first.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if entry.name not in found or is_own_package(entry.value):
            found[entry.name] = entry
    return found


def own_folder(name: str) -> Path:
    """Return the folder ``configs``, ``examples`` or ``docs``,
    of the installed package or at the top of a checkout.
    """
    installed = TRAINER / name
    return installed if installed.is_dir() else TRAINER.parents[1] / name
