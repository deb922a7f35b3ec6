"""Settings of the adapters that an import from peft accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ModelError
from meshwright_interop.huggingface.adapters import CONFIG

READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"}
OTHERS = """
    target_modules exclude_modules layers_to_transform layers_pattern fan_in_fan_out
    init_lora_weights loftq_config eva_config corda_config lora_ga_config
    base_model_name_or_path revision task_type inference_mode auto_mapping peft_version
    megatron_core qalora_group_size runtime_config merge_weights
"""
"""Keys of the targets, which follow from the names of the tensors; of initial values, of which
``init_lora_weights`` has a check of its own; and keys without effect.
"""
KNOWN = READ | set(OTHERS.split())
"""Keys of adapter_config.json with any value. Others must be off,
since they may make another model of the file.
"""
SAME_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is.
PiSSA and others change its weights at the start.
"""


class AdapterSettings(NamedTuple):
    """Settings of all adapters of a file."""

    rank: int
    factor: float
    """Factor on an adapter's output: alpha / rank, or alpha / rank^0.5 with ``use_rslora``."""
    dropout: float
    dora: bool
    """True if each module has a vector of magnitudes, ``lora_magnitude_vector``."""

    @property
    def kinds(self) -> set[str]:
        """Endings of the tensors of a module."""
        return {"A", "B", *["magnitude_vector"] * self.dora}


def settings_of(fields: Mapping[str, Any], source: Path) -> AdapterSettings:
    """Return the settings of adapters from the fields of peft's configuration in ``source``.

    Raises:
        ModelError: the adapters are not plain LoRA, or not those of the unchanged base.
    """
    problems = (
        [f"peft_type = {json.dumps(fields.get('peft_type'))}"]
        if fields.get("peft_type") != "LORA"
        else []
    )
    set_keys = [key for key, value in fields.items() if value and (key, value) != ("bias", "none")]
    others = [key for key in set_keys if key not in KNOWN]
    if fields.get("init_lora_weights") not in SAME_BASE:
        others.append("init_lora_weights")
    problems += [f"{key} = {json.dumps(fields[key])}" for key in others]
    rank, alpha, dropout = (
        fields.get("r"),
        fields.get("lora_alpha"),
        fields.get("lora_dropout") or 0.0,
    )
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and alpha > 0):
        problems.append(f"r = {json.dumps(rank)} with lora_alpha = {json.dumps(alpha)}")
    if problems:
        raise ModelError(
            "MW-INTEROP-104",
            f"{source / CONFIG}: {', '.join(problems)}: only LoRA of one rank and scale on an"
            " unchanged base is imported; convert adapters of PiSSA and the like with peft"
            " (save_pretrained with path_initial_model_for_weight_conversion), or merge them there"
            " and import the model",
        )
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    factor = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    return AdapterSettings(rank, factor, dropout, bool(fields.get("use_dora")))
