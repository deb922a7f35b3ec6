"""Fields that a config.json leaves out: the defaults of transformers' configuration classes;
multi-token prediction.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import ModelError
from meshwright_interop.huggingface.convert.families import FAMILIES
from meshwright_interop.huggingface.convert.family import Family
from meshwright_interop.huggingface.convert.importing import import_model
from meshwright_interop.huggingface.convert.settings import Settings
from tests.interop.huggingface import theirs
from tests.interop.huggingface.conftest import Written
from tests.support.errors import has_code
from tests.support.plain import load_plain

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
GIVEN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "t5": {},
    "deepseek_v3": SIZES | {"num_key_value_heads": 8},  # their default of 128 fits 128 heads alone
}
WINDOWS: list[dict[str, Any]] = [
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None},
    {"sliding_window": 16},
]


def options_of(family: Family, fields: dict[str, Any]) -> dict[str, Any]:
    """Options of a model with these fields of a config.json."""
    settings = Settings(fields, "config.json", family.aliases)
    options = family.read(settings)
    settings.end()
    return options


@pytest.mark.parametrize("more", [{}, *WINDOWS], ids=json.dumps)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_fields_left_out_are_those_of_their_class(family: Family, more: dict[str, Any]) -> None:
    import transformers

    if more and not family.model_type.startswith("qwen"):
        pytest.skip("no field of this class")
    fields = GIVEN.get(family.model_type, SIZES) | more
    complete = getattr(transformers, family.architecture).config_class(**fields).to_dict()
    assert len(complete) > len(fields) + 10
    assert options_of(family, fields) == options_of(family, complete)


def test_a_window_of_qwen3_moe_is_that_of_all_layers(tmp_path: Path) -> None:
    """Qwen2 and Qwen3 have it from max_window_layers on;
    Qwen3-MoE's attention does not read that field.
    """
    import transformers

    fields = theirs.SIZES | theirs.ROUTED | {"moe_intermediate_size": 24, "head_dim": 12}
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 28}
    case = theirs.Case("Qwen3MoeConfig", "Qwen3MoeForCausalLM", fields | window)
    model = theirs.build(case)
    assert isinstance(model, transformers.Qwen3MoeForCausalLM)
    model.save_pretrained(tmp_path / "theirs")
    brought = import_model(tmp_path / "theirs", tmp_path / "run")
    assert brought.config.model.options["sliding_window"] == 6
    ids = torch.randint(1, theirs.VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    _, layers = load_plain(tmp_path / "run")
    assert (theirs.our_logits(layers, ids, False) - theirs.logits(model, ids)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "with_tensors", [False, True], ids=["as transformers writes it", "as published"]
)
def test_modules_of_multi_token_prediction_are_left_out(
    with_tensors: bool, written: Callable[..., Written], tmp_path: Path
) -> None:
    """DeepseekV3Config says 1 by default, without a module in its class;
    published files hold it as a last layer.
    """
    path, model = written("deepseek_v3")
    source = tmp_path / "theirs"
    shutil.copytree(path, source)
    fields = json.loads((source / "config.json").read_text())
    fields["num_nextn_predict_layers"] = 1
    (source / "config.json").write_text(json.dumps(fields))
    if with_tensors:
        tensors = {
            name: each
            for file in source.glob("*.safetensors")
            for name, each in load_file(file).items()
        }
        for file in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
            file.unlink()
        last = {name: each for name, each in tensors.items() if name.startswith("model.layers.2.")}
        module = {
            name.replace("layers.2.", "layers.3."): each.clone() for name, each in last.items()
        }
        module["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)
        save_file(tensors | module, source / "model.safetensors", {"format": "pt"})
    brought = import_model(source, tmp_path / "run")
    assert [note.partition(": ")[2] for note in brought.notes] == [
        "num_nextn_predict_layers = 1: modules of multi-token prediction are left out, as by"
        " DeepseekV3ForCausalLM"
    ]
    ids = torch.randint(1, theirs.VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    _, layers = load_plain(tmp_path / "run")
    assert (theirs.our_logits(layers, ids, False) - theirs.logits(model, ids)).abs().max() < 1e-5


def of_kind(kind: str, **fields: Any) -> dict[str, Any]:
    """Options of a model of ``kind`` with these fields."""
    family = next(family for family in FAMILIES if family.model_type == kind)
    return options_of(family, GIVEN.get(kind, SIZES) | fields)


def test_null_is_false_where_transformers_tests_for_truth() -> None:
    """Read as the default, DeepSeek-V3's logits were 2.3 off with ``norm_topk_prob`` and 7
    with ``rope_interleave``.
    """
    assert of_kind("deepseek_v3", norm_topk_prob=None) == of_kind(
        "deepseek_v3", norm_topk_prob=False
    )
    assert of_kind("t5", tie_word_embeddings=None)["tied"], "its class asks for `is not False`"
    for kind, name in (
        ("deepseek_v3", "rope_interleave"),
        ("mistral", "is_causal"),
        ("gpt2", "is_causal"),
    ):
        with pytest.raises(ModelError, match=f"{name} = null", check=has_code("MW-INTEROP-038")):
            of_kind(kind, **{name: None})


@pytest.mark.parametrize("value", [5, True, [1]])
def test_dense_layers_of_qwen3_moe_are_a_list_from_0_on(value: Any) -> None:
    with pytest.raises(ModelError, match="mlp_only_layers = ", check=has_code("MW-INTEROP-038")):
        of_kind("qwen3_moe", mlp_only_layers=value)


def test_a_deepseek_without_shared_experts(tmp_path: Path) -> None:
    """Its class saves a shared network without features."""
    case = theirs.CASES["deepseek_v3"]
    model = theirs.build(case._replace(settings=case.settings | {"n_shared_experts": 0}))
    model.save_pretrained(tmp_path / "theirs")
    assert (
        import_model(tmp_path / "theirs", tmp_path / "run").config.model.options["moe"][
            "shared_ffn_size"
        ]
        == 0
    )
    ids = torch.randint(1, theirs.VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    _, layers = load_plain(tmp_path / "run")
    assert (theirs.our_logits(layers, ids, False) - theirs.logits(model, ids)).abs().max() < 1e-5
