"""meshwright: 3D-parallel training of a plain ``nn.Sequential``,
with the same numbers on any layout.

The names below are the public Python API (docs/python.md); deeper imports are private and may
change. To read the code, start at ``train.py``. Names are imported when they are used: the command
line needs no torch to start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.config import RunConfig as RunConfig
    from meshwright.errors import CallbackError as CallbackError
    from meshwright.errors import CheckpointError as CheckpointError
    from meshwright.errors import ConfigError as ConfigError
    from meshwright.errors import LockError as LockError
    from meshwright.errors import Preempted as Preempted
    from meshwright.errors import UserError as UserError
    from meshwright.model.metrics import record as record
    from meshwright.parts import Observer as Observer
    from meshwright.parts import Parts as Parts
    from meshwright.parts import StepEvent as StepEvent
    from meshwright.parts import StepStats as StepStats
    from meshwright.tensor_parallel.plan import SplitLayer as SplitLayer
    from meshwright.tracking.record import StepRecord as StepRecord
    from meshwright_launch.failure import RankFailed as RankFailed
    from meshwright_launch.python import OpenRun as OpenRun
    from meshwright_launch.python import evaluate as evaluate
    from meshwright_launch.python import load_config as load_config
    from meshwright_launch.python import make_config as make_config
    from meshwright_launch.python import open_run as open_run
    from meshwright_launch.python import run_training as run_training
    from meshwright_launch.python import sample as sample
    from meshwright_launch.python import spawn as spawn

_SOURCES = {
    "meshwright.config": ("RunConfig",),
    "meshwright.errors": (
        "CallbackError",
        "CheckpointError",
        "ConfigError",
        "LockError",
        "Preempted",
        "UserError",
    ),
    "meshwright_launch.failure": ("RankFailed",),
    "meshwright_launch.python": (
        *(
            "OpenRun",
            "evaluate",
            "load_config",
            "make_config",
            "open_run",
            "run_training",
            "sample",
            "spawn",
        ),
    ),
    "meshwright.model.metrics": ("record",),
    "meshwright.parts": ("Observer", "Parts", "StepEvent", "StepStats"),
    "meshwright.tensor_parallel.plan": ("SplitLayer",),
    "meshwright.tracking.record": ("StepRecord",),
}
"""Module -> its names in the public API."""
__all__ = sorted(name for names in _SOURCES.values() for name in names)  # noqa: PLE0605


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        for module, names in _SOURCES.items():
            if name in names:
                return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
