"""Lookup of a model's family, by a transformers config.json or by a meshwright builder
and its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from meshwright.config import Model
from meshwright.config.functions import find_function
from meshwright.errors import ModelError
from meshwright_interop.huggingface.convert.decoders import LLAMA, MISTRAL, QWEN2, QWEN3
from meshwright_interop.huggingface.convert.family import Family
from meshwright_interop.huggingface.convert.gpt2 import GPT2
from meshwright_interop.huggingface.convert.mixtures import DEEPSEEK_V3, MIXTRAL, OLMOE, QWEN3_MOE
from meshwright_interop.huggingface.convert.t5 import T5

FAMILIES = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, OLMOE, QWEN3_MOE, DEEPSEEK_V3, T5)
"""Supported families; an export uses the first one that can hold the model."""


def family_of_type(model_type: Any, place: str) -> Family:
    """Return the family with the ``model_type`` of a config.json. ``place``: its path,
    for the error message.

    Raises:
        ModelError: the model type is missing or not supported.
    """
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    problem = (
        f'model_type "{model_type}" is not supported' if model_type else "model_type is missing"
    )
    raise ModelError("MW-INTEROP-031", f"{place}: {problem}; supported: {known}")


def with_defaults(builder: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a builder with its defaults filled in."""
    function = find_function(
        builder, "model.builder", "a function that returns an nn.Sequential", ModelError
    )
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }
    complete = defaults | dict(options)
    off = [table for table in ("moe", "rope_yarn") if complete.get(table) == "none"]
    return complete | dict.fromkeys(off)


def family_of_model(model: Model, preferred: Any = None) -> Family:
    """Return the family that a meshwright model can be exported as.

    Args:
        config: names the model's builder and options.
        preferred: a model_type that is tried first.

    Raises:
        ModelError: no family can hold the model; lists the reason of each, or of a mixture that of
            the closest one.
    """
    builder = model.builder
    candidates = [family for family in FAMILIES if family.builder == builder]
    if not candidates:
        known = ", ".join(dict.fromkeys(family.builder for family in FAMILIES))
        raise ModelError(
            "MW-INTEROP-032",
            f"model.builder = {builder}: transformers has no names for its tensors, only for those"
            f" of {known}. The checkpoint itself is plain safetensors, see docs/checkpoints.md",
        )
    options = with_defaults(builder, model.options)
    candidates.sort(key=lambda family: family.model_type != preferred)
    reasons = {}
    for family in candidates:
        reason = family.holds(options)
        if reason is None:
            return family
        reasons[family.model_type] = reason
    if options.get("moe") is not None:
        closest = _closest_mixture(options).model_type
        said = f"; the closest is {closest}, which has another value than {reasons[closest]}"
    else:
        said = ": " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ModelError(
        "MW-INTEROP-033", f"model.options fit no supported model of transformers{said}"
    )


def _closest_mixture(options: Mapping[str, Any]) -> Family:
    """Return the family of mixtures whose attention is that of a model with these options."""
    if options["mla"] is not None:
        return DEEPSEEK_V3
    return {"whole": OLMOE, True: QWEN3_MOE}.get(options["qk_norm"], MIXTRAL)
