"""The configurations of released models are read without a word of doubt,
and give models of their very size.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.errors import UserError
from meshwright.model.build import build_model
from meshwright_interop.huggingface.convert.families import (
    family_of_model,
    family_of_type,
    with_defaults,
)
from meshwright_interop.huggingface.convert.settings import Settings
from tests.interop.huggingface import theirs
from tests.interop.huggingface.released import RELEASED
from tests.support.errors import has_code
from tests.support.marks import long_row


@pytest.mark.parametrize("name", RELEASED)
def test_they_are_read_whole_and_have_the_parameters_that_are_published(name: str) -> None:
    fields, parameters, expected = RELEASED[name]
    family = family_of_type(fields["model_type"], name)
    settings = Settings(dict(fields), name)
    options = family.read(settings)
    settings.end()
    assert settings.notes == []
    assert expected.items() <= options.items()
    model = build_model(family.builder, options, 0)
    shapes = {n: p.shape for n, p in model.layers.named_parameters() if model.canonical(n) == n}
    assert sum(shape.numel() for shape in shapes.values()) == parameters

    # each tensor has its names over there, and what is written says the same of the model
    rules = family.rules(with_defaults(family.builder, options))
    assert {rule.ours for rule in rules} == shapes.keys()
    names = [theirs for rule in rules for theirs in rule.theirs]
    assert len(set(names)) == len(names)
    written = family.write(with_defaults(family.builder, options))
    again = Settings(written, name)
    assert family.read(again) == options
    again.end()
    assert again.notes == []
    for field, value in written.items():
        if fields.get(field) is not None and field not in ("max_window_layers", "sliding_window"):
            assert fields[field] == value, field
    config = RunConfig.model_validate({"model": {"builder": family.builder, "options": options}})
    assert family_of_model(config.model, family.model_type) is family


STRANGE: list[Any] = [
    None,
    "x",
    "",
    [],
    ["x"],
    [[1]],
    {},
    {"rope_type": []},
    -1,
    0,
    1,
    3,
    1.5,
    True,
    False,
    10**30,
    "nan",
]


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama 3.1", "mistral, window", "qwen2, window", "qwen3", long_row("t5, version 1.1")],
)
def test_any_field_may_be_nonsense_and_is_refused_in_words(name: str) -> None:
    """A model is built of it, or it is named; never another kind of failure."""
    case = theirs.CASES[name]
    model_type = case.config.removesuffix("Config").lower()
    family = family_of_type(model_type, "config.json")
    extra = {
        "head_dim": 8,
        "layer_types": None,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "n_inner": None,
    }
    extra |= {
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": None,
        "quantization_config": None,
    }
    extra |= {
        "max_window_layers": 0,
        "sliding_window": None,
        "scale_decoder_outputs": None,
        "pad_token_id": None,
    }
    fields = (
        extra
        | {"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-6, "resid_pdrop": 0.1}
        | case.settings
    )
    rope = fields.get("rope_parameters") or {}
    spoiled = [{field: value} for field in fields for value in STRANGE]
    spoiled += [{"rope_parameters": rope | {field: value}} for field in rope for value in STRANGE]
    refused = 0
    for change in spoiled:
        settings = Settings(fields | change, "config.json")
        try:
            options = family.read(settings)
            settings.end()
            if change.popitem()[1] == 3:  # each takes its time
                rules = family.rules(with_defaults(family.builder, options))
                model = build_model(family.builder, options, 0)
                names = {n for n, _ in model.layers.named_parameters() if model.canonical(n) == n}
                assert {rule.ours for rule in rules} == names
        except UserError as error:
            refused += 1
            assert "config.json: " in str(error) or "model.options" in str(error)
    assert refused > len(spoiled) / 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "llama"),
        ({"qkv_bias": True, "out_bias": True, "mlp_bias": True}, "llama"),
        ({"sliding_window": 8}, "mistral"),
        ({"hidden_size": 30, "head_dim": 8}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "sliding_window": 8}, "qwen2"),
        ({"qk_norm": True, "head_dim": 16}, "qwen3"),
        (
            {"qk_norm": True, "mlp_bias": True},
            "fit no supported model of transformers: llama: .*qk_norm = true",
        ),
        ({"out_bias": True}, "qwen2: model.options.qkv_bias = false"),
        (
            {"moe": {"num_experts": 4, "top_k": 2, "router": "sigmoid"}},
            r'transformers; the closest is mixtral, .* model\.options\.moe\.router = "sigmoid"$',
        ),
        (
            {"moe": {"num_experts": 4, "top_k": 2, "shared_ffn_size": 8}, "qk_norm": True},
            r"transformers; the closest is qwen3_moe, .* model\.options\.moe\.shared_ffn_size = 8$",
        ),
    ],
)
def test_a_model_that_began_here_is_of_the_family_that_can_hold_it(
    options: dict[str, Any], said: str
) -> None:
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 40,
    }
    config = RunConfig.model_validate(
        {"model": {"builder": "meshwright_models.llama:build", "options": sizes | options}}
    )
    if " " in said:
        with pytest.raises(UserError, check=has_code("MW-INTEROP-033")) as error:
            family_of_model(config.model)
        assert re.search(said, error.value.message) and len(error.value.message) < 500
        return
    family = family_of_model(config.model)
    assert family.model_type == said
    with pytest.raises(
        UserError,
        check=has_code("MW-INTEROP-032"),
    ):
        family_of_model(
            config.model_copy(
                update={"model": config.model.model_copy(update={"builder": "my.own:net"})}
            ).model
        )
