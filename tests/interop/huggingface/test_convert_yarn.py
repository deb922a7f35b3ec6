"""YaRN in and out: the configurations of DeepSeek-V3 and Kimi-K2, the same table again, and values
that mean nothing.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.families import family_of_type, with_defaults
from meshwright_interop.huggingface.convert.importing import import_model
from meshwright_interop.huggingface.convert.settings import Settings
from meshwright_interop.huggingface.files import with_known_type
from tests.interop.huggingface.conftest import Written
from tests.support.errors import has_code

Write = Callable[..., Written]

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
KIMI_K2 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"]
    | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2"])
def test_the_largest_models_with_yarn_are_read_whole(name: str) -> None:
    fields: dict[str, Any] = {"deepseek_v3": DEEPSEEK_V3, "kimi_k2": KIMI_K2}[name]
    family = family_of_type(with_known_type(fields)["model_type"], name)
    settings = Settings(fields, name)
    options = family.read(settings)
    settings.end()
    assert [note for note in settings.notes if "multi-token prediction" not in note] == []
    table = {key: value for key, value in fields["rope_scaling"].items() if key != "type"}
    table["original_length"] = table.pop("original_max_position_embeddings")
    assert options["rope_yarn"] == table
    model = build_model(family.builder, options, 0).layers
    experts = fields["n_routed_experts"] + 1
    per_mixture = 7168 * (3 * 2048 * experts + experts - 1)
    of_attention = 7168 * (1536 + 576 + 128 * fields["num_attention_heads"])
    of_attention += fields["num_attention_heads"] * (1536 * 192 + 512 * 256)
    dense = fields["first_k_dense_replace"]
    expected = 61 * (of_attention + 1536 + 512 + 2 * 7168) + dense * 3 * 7168 * 18432
    expected += (61 - dense) * per_mixture + 7168 * (2 * fields["vocab_size"] + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    core = model.block60.attention.core
    scale = 1 + 0.1 * math.log(table["factor"])
    assert core.score_divisor == pytest.approx(math.sqrt(192) / scale**2)
    written = family.write(with_defaults(family.builder, options))
    assert written["rope_scaling"].pop("rope_type") == fields["rope_scaling"]["type"]
    for field in written.keys() & fields.keys() - {"num_nextn_predict_layers", "rope_scaling"}:
        assert written[field] == fields[field], field
    assert written["rope_scaling"].items() <= fields["rope_scaling"].items()


@pytest.mark.parametrize("name", ["llama, YaRN", "qwen3, YaRN", "deepseek_v3, YaRN"])
def test_the_table_comes_back_as_it_was(name: str, written: Write, tmp_path: Path) -> None:
    path, _ = written(name)
    brought = import_model(path, tmp_path / "run")
    out = export_checkpoint(brought.path, tmp_path / "out").path
    before, after = (json.loads((each / "config.json").read_text()) for each in (path, out))
    assert after["rope_parameters"] == before["rope_parameters"]
    assert after["rope_parameters"].items() >= after["rope_scaling"].items()


def test_kimi_k2_is_exported_as_the_class_that_transformers_has(
    written: Write, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(written("deepseek_v3, YaRN")[0], path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"model_type": "kimi_k2", "mine": 3}))
    brought = import_model(path, tmp_path / "run")
    out = export_checkpoint(brought.path, tmp_path / "out").path
    after = json.loads((out / "config.json").read_text())
    assert (after["model_type"], after["mine"]) == ("deepseek_v3", 3)


def test_an_import_may_leave_the_scaling_out(written: Write, tmp_path: Path) -> None:
    path, _ = written("llama, YaRN")
    brought = import_model(path, tmp_path / "run", ["--model.options.rope_yarn=none"])
    out = export_checkpoint(brought.path, tmp_path / "out").path
    after = json.loads((out / "config.json").read_text())
    assert after["rope_parameters"] == {"rope_type": "default", "rope_theta": 100.0}
    assert after["rope_scaling"] is None


GIVEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factor": None}, 'factor is missing, which rope_type "yarn" needs'),
        ({"factor": 0.5}, "factor = 0.5: a number from 1 up is needed"),
        ({"factor": "4"}, 'factor = "4": a number from 1 up is needed'),
        ({"factor": math.nan}, "factor = NaN: a number from 1 up is needed"),
        (
            {"original_max_position_embeddings": None},
            'original_max_position_embeddings is missing, which rope_type "yarn" needs',
        ),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast = 1 must not be below beta_slow = 2"),
        ({"beta_slow": 40}, "beta_fast = 32 must not be below beta_slow = 40"),
        ({"beta_fast": [1]}, "beta_fast = [1]: a number from 1e-30 up is needed"),
        ({"attention_factor": 0.0}, "attention_factor = 0.0: a number from 1e-30 up is needed"),
        ({"attention_factor": math.inf}, "attention_factor = Infinity: a number from 1e-30 up"),
        ({"mscale": -1}, "mscale = -1: a number from 0 up is needed"),
        ({"rope_theta": 1.0}, "rope_theta = 1.0: YaRN needs a number above 1"),
        ({"truncate": "no"}, 'truncate = "no": true or false is needed'),
    ],
)
def test_a_table_that_means_nothing_is_one_message(changes: dict[str, Any], said: str) -> None:
    fields = {"max_position_embeddings": 64, "rope_parameters": GIVEN | changes}
    settings = Settings(fields, "config.json")
    family_of_type("llama", "config.json").read(settings)
    with pytest.raises(ModelError, check=has_code("MW-INTEROP-038")) as caught:
        settings.end()
    lines = [line for line in str(caught.value).splitlines() if "rope_parameters" in line]
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(
    ("longest", "given", "notes"),
    [
        (64, {}, []),
        (16, {}, []),
        (
            80,
            {},
            ["max_position_embeddings = 80 is not factor = 4 times original_max_position_emb"],
        ),
        (64, {"extrapolation": 1}, ["rope_parameters.extrapolation = 1 is not known here"]),
    ],
)
def test_what_a_table_says_besides_is_printed(
    longest: int, given: dict[str, Any], notes: list[str]
) -> None:
    fields = {"max_position_embeddings": longest, "rope_parameters": GIVEN | given}
    settings = Settings(fields, "config.json")
    family_of_type("llama", "config.json").read(settings)
    assert len(settings.notes) == len(notes)
    assert all(re.search(note, found) for note, found in zip(notes, settings.notes, strict=True))
