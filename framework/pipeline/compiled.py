"""``train.compile``: torch.compile of each layer on its own, by default on CUDA."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import nn

from meshwright.config import RunConfig


def compile_layers(layers: Iterable[nn.Module], config: RunConfig, device: torch.device, *, warns: bool) -> None:
    """Apply torch.compile to each layer where the configuration asks for it. Compiles nothing before the first forward.

    With ``auto`` a machine that cannot compile for CUDA trains without, with a warning. With ``true`` it fails in the
    first step, with torch's error.

    Args:
        warns: this rank gives the warning.
    """
    wanted = config.train.compile
    if wanted == "auto":
        # parts of a compiled layer cannot be recomputed
        wanted = device.type == "cuda" and config.pipeline.recompute in ("none", "full")
        missing = missing_tools() if wanted else []
        if missing:
            wanted = False
            if warns:
                warnings.warn(
                    f'train.compile = "auto": {" and ".join(missing)} not found, so layers run without '
                    f"torch.compile and slower; install what is missing, or set train.compile = false",
                    stacklevel=2,
                )
    if wanted:
        for layer in layers:
            layer.compile()


def missing_tools() -> list[str]:
    """Return the tools that torch.compile lacks on this machine to make CUDA kernels."""
    found = {
        "Triton": find_spec("triton") is not None,
        "a C compiler": any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")),
    }
    return [name for name, is_here in found.items() if not is_here]
