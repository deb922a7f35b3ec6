"""``train.compile``: torch.compile of each layer on its own, by default on CUDA."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

from meshwright.config import Pipeline, Train
from meshwright.errors import ConfigError
from meshwright.model.functional_dropout import NAME
from meshwright.system.host import missing_tools
from meshwright.system.working_folder import why_not_own


def compile_layers(
    layers: nn.Sequential,
    train: Train,
    pipeline: Pipeline,
    device: torch.device,
    *,
    warns: bool,
) -> None:
    """Apply torch.compile to each layer where the configuration asks for it.
    Compiles nothing before the first forward, and no layer with functional dropouts.

    With ``auto`` a machine that cannot compile for CUDA trains without, with a warning. With
    ``true`` it fails in the first step, with torch's error.

    Args:
        warns: this rank gives the warning.

    Raises:
        ConfigError: torch's cache of compiled code is another user's.
    """
    wanted = train.compile
    if wanted == "auto":
        # parts of a compiled layer cannot be recomputed
        wanted = device.type == "cuda" and pipeline.recompute in ("none", "full")
        missing = missing_tools() if wanted else []
        if missing:
            wanted = False
            if warns:
                warnings.warn(
                    f'train.compile = "auto": {" and ".join(missing)} not found, so layers run'
                    " without torch.compile and slower; install what is missing, or set"
                    " train.compile = false",
                    stacklevel=2,
                )
    if wanted:
        check_cache()
        left = [layer for layer in layers if NAME in layer._modules]
        for layer in layers:
            if layer not in left:
                layer.compile()
        if left and warns:
            warnings.warn(
                f"train.compile: {len(left)} layers with functional dropouts"
                f" ({type(left[0]).__name__}) run without torch.compile, which breaks their graphs"
                " at each function that draws by name; use nn.Dropout modules to compile them",
                stacklevel=2,
            )


def default_cache() -> Path:
    """Return torch's own folder of compiled code, as its inductor chooses it."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a container whose user has no name
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def check_cache() -> None:
    """Check that torch's cache of compiled code, whose name in /tmp can be guessed, is this user's:
    it is executed.

    A folder that ``TORCHINDUCTOR_CACHE_DIR`` names is the user's choice.

    Raises:
        ConfigError: it is a link, or belongs to another user.
    """
    folder = default_cache()
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(folder)) != str(folder):
        return
    reason = why_not_own(folder)
    if reason is not None:
        raise ConfigError(
            "MW-PIPELINE-047",
            f"{folder}, torch's cache of compiled code, {reason}: its code would be executed. Name"
            " a folder of your own as TORCHINDUCTOR_CACHE_DIR, or set train.compile = false",
        )
