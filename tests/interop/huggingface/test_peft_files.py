"""Settings of peft's adapters: plain LoRA is imported,
everything that makes another model of it is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ModelError
from meshwright_interop.huggingface.peft_files import AdapterSettings, settings_of
from tests.support.errors import has_code

DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": False,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
"""The adapter_config.json that peft 0.21.2 writes for ``LoraConfig(target_modules=["q_proj"])``."""
HARMLESS: list[dict[str, Any]] = [
    *({"init_lora_weights": value} for value in (False, None, "gaussian", "eva", "orthogonal")),
    {
        "base_model_name_or_path": "/m",
        "revision": "main",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    },
    {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}},
    {
        "exclude_modules": ["lm_head"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
        "fan_in_fan_out": True,
    },
    {
        "init_lora_weights": True,
        "corda_config": {"corda_method": "ipm"},
        "loftq_config": {"loftq_bits": 4},
    },
]
CHANGED = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "mica", ["pissa"])
OTHER: list[dict[str, Any]] = [
    {"alora_invocation_tokens": [1, 2]},
    {"use_qalora": True},
    {"trainable_token_indices": [5]},
    {"arrow_config": {"top_k": 3}},
    {"monteclora_config": {"num_samples": 8}},
    {"modules_to_save": ["lm_head"]},
    {"bias": "all"},
    {"rank_pattern": {"q_proj": 4}},
    {"a_key_of_tomorrow": 1},
]


def test_the_defaults_of_peft_are_plain() -> None:
    assert settings_of(DEFAULTS, Path("a")) == AdapterSettings(8, 1.0, 0.0, False)


def test_the_defaults_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    peft.LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    found = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings_of(found, tmp_path) == settings_of(DEFAULTS, tmp_path)


@pytest.mark.parametrize("changes", HARMLESS, ids=str)
def test_settings_that_change_no_number_are_left_out(changes: dict[str, Any]) -> None:
    assert settings_of(DEFAULTS | changes, Path("a")) == settings_of(DEFAULTS, Path("a"))


@pytest.mark.parametrize("value", CHANGED, ids=str)
def test_adapters_of_a_changed_base_are_refused(value: Any) -> None:
    """PiSSA and others take the initial B A off the base's weights:
    on the unchanged base they are another model.
    """
    with pytest.raises(
        ModelError,
        match="path_initial_model_for_weight_conversion",
        check=has_code("MW-INTEROP-104"),
    ) as caught:
        settings_of(DEFAULTS | {"init_lora_weights": value}, Path("a"))
    assert (
        caught.value.code == "MW-INTEROP-104"
        and f"init_lora_weights = {json.dumps(value)}" in str(caught.value)
    )


@pytest.mark.parametrize("changes", OTHER, ids=str)
def test_adapters_that_are_more_than_lora_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, check=has_code("MW-INTEROP-104")) as caught:
        settings_of(DEFAULTS | changes, Path("a"))
    ((key, value),) = changes.items()
    assert (
        caught.value.code == "MW-INTEROP-104"
        and f"{key} = {json.dumps(value)}: only LoRA" in str(caught.value)
    )
