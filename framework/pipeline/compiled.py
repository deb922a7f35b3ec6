"""``train.compile``: torch.compile of each layer on its own, by default on CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from meshwright.config import RunConfig
from meshwright.system.host import missing_tools


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
