"""Run of transformers' own model, before any change:
separates a model that cannot run from one that cannot be cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.model.functional_dropout import FunctionalDropoutMode, RecordingDrawer
from meshwright.model.outline import parameters_on_meta
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_interop.huggingface.restructure.observation import BATCH, LENGTH, observe


def check_untouched(config: Any, place: str, attention: str | None) -> None:
    """Build the model of ``config`` anew, and run it on meta;
    call this only after the restructured one has failed.

    A run that reads values, which meta tensors do not have, proves nothing, and passes.

    Raises:
        ModelError: transformers' own model fails as well, so that the cause lies in the
            configuration.
    """
    try:
        _run(config, attention)
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, NotImplementedError) or "meta tensor" in reason:
            return
        raise ModelError(
            "MW-INTEROP-147",
            f"{place}: transformers itself cannot run this model: its own {_class_name(config)},"
            f" unchanged, fails on token ids of shape [{BATCH}, {LENGTH}] with"
            f" {type(error).__name__}: {reason}. Correct the values in config.json or model.options"
            " that do not fit together, such as heads, widths and lists of layers",
        ) from error


def untouched_dropouts(config: Any, attention: str | None) -> list[tuple[int, float]] | None:
    """Return the functional dropouts of transformers' own model, in one training forward on meta:
    (number of dims, p). None: it reads values, which meta tensors do not have.
    """
    drawer = RecordingDrawer()
    try:
        with FunctionalDropoutMode(drawer):
            _run(config, attention)
    except Exception:
        return None
    return [(len(shape) + 1, p) for shape, p in drawer.calls]


def _run(config: Any, attention: str | None) -> None:
    """Build the model of ``config`` anew, and run it on meta in training."""
    chosen = {} if attention is None else {"attn_implementation": attention}
    with parameters_on_meta():
        model = import_transformers().AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False, **chosen
        )
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta")
    for module in model.to("meta").train().modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    observe(model, {}, ids)


def _class_name(config: Any) -> str:
    return str(import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)
