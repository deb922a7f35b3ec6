"""What the tests of tracking share: a way to make records,
and an environment without the user's wandb.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import pytest

from meshwright.tracking.record import StepRecord


class MakeRecord(Protocol):
    def __call__(self, step: int, **changes: Any) -> StepRecord: ...


@pytest.fixture
def record() -> MakeRecord:
    """A plain record of a step; name what shall differ."""

    def make(step: int, **changes: Any) -> StepRecord:
        values: dict[str, Any] = {
            "step": step,
            "samples_seen": 16 * step,
            "tokens": 2048 * step,
            "loss": 8.0 / step + 0.1,
            "grad_norm": 1.25,
            "learning_rate": 3e-4,
            "step_s": 0.5,
            "data_s": 0.01,
            "tokens_per_s": 4096.0,
            "num_devices": 8,
            "memory_bytes": 3 * 2**29,
        }
        return StepRecord(**(values | changes))

    return make


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No WANDB_* variable, no key, no saved settings, no proxy."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-config"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
