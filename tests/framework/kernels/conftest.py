"""Kernels in Triton's interpreter, on CPU tensors: numbers without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

REASON = "runs with Triton installed and TRITON_INTERPRET=1, see docs/gpu.md"


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Enter the operators on a CPU; skip where Triton is not there, or would not interpret."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it once, when it is imported
        pytest.skip(REASON)
    pytest.importorskip("triton", reason=REASON)
    from meshwright.kernels import adamw_8bit, dropout

    for operator, function in (("dropout", dropout._drop), ("adamw_8bit", adamw_8bit._step)):
        torch.library.register_kernel(f"meshwright::{operator}", "cpu", function._init_fn)


@pytest.fixture
def on_cpu(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take the place of plain torch code on CPU tensors."""
    monkeypatch.setattr("meshwright.kernels.DEVICES", {"cpu"})
    monkeypatch.setattr("meshwright.kernels.has_tools", lambda: True)
