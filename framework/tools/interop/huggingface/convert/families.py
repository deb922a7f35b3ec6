"""Which family a model is of, by their config.json or by our builder and its options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from meshwright.config import RunConfig
from meshwright.config.functions import find_function
from meshwright.errors import ModelError
from meshwright.tools.interop.huggingface.convert.decoders import LLAMA, MISTRAL, QWEN2, QWEN3
from meshwright.tools.interop.huggingface.convert.family import Family
from meshwright.tools.interop.huggingface.convert.gpt2 import GPT2
from meshwright.tools.interop.huggingface.convert.t5 import T5

FAMILIES = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, T5)
"""Of those that could hold a model of ours, the first that does is written."""


def family_of_type(model_type: Any, place: str) -> Family:
    """By the ``model_type`` of a config.json; ``place`` is its path."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    said = f'model_type "{model_type}" is not supported' if model_type else "model_type is missing"
    raise ModelError(f"{place}: {said}: {known} are")


def complete(builder: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a builder with its defaults filled in."""
    function = find_function(builder, "model.builder", "a function that returns an nn.Sequential", ModelError)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }
    return defaults | dict(options)


def family_of_model(config: RunConfig, preferred: Any = None) -> Family:
    """Which one our model can be written as; ``preferred``: a model_type, taken if it can hold the model.

    Raises:
        ModelError: none can, with the reason of each.
    """
    builder = config.model.builder
    candidates = [family for family in FAMILIES if family.builder == builder]
    if not candidates:
        known = ", ".join(dict.fromkeys(family.builder for family in FAMILIES))
        raise ModelError(
            f"model.builder = {builder}: its tensors have no names in transformers; those of {known} have. The "
            f"checkpoint itself is plain safetensors: docs/checkpoints.md tells how to read it"
        )
    options = complete(builder, config.model.options)
    candidates.sort(key=lambda family: family.model_type != preferred)
    reasons = []
    for family in candidates:
        why = family.holds(options)
        if why is None:
            return family
        reasons.append(f"{family.model_type}: {why}")
    raise ModelError(f"model.options fit no model of transformers that is known here: {'; '.join(reasons)}")
