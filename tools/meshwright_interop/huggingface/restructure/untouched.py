"""Run of transformers' own model, before any change:
separates a model that cannot run from one that cannot be cut.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import ModelError
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
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with parameters_on_meta():
            model = import_transformers().AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False, **chosen
            )
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta")
        observe(model.to("meta").train(), {}, ids)
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


def _class_name(config: Any) -> str:
    return str(import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)
