"""Export of models with muP: transformers computes the same logits from weights
that hold the multipliers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import meshwright
from meshwright.checkpoint import TensorKind, find, open_checkpoint
from meshwright.errors import ConfigError
from meshwright.parameters import ParameterInfo
from meshwright_interop.commands.conversion import convert
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.importing import import_model
from tests.launch.test_python import made
from tests.support.errors import has_code
from tests.support.plain import load_plain

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": 16,
}
LLAMA = SIZES | {"num_kv_heads": 2, "ffn_size": 48}
MUP = {
    "mup_base_size": 8,
    "mup_base_head_dim": 2,
    "mup_embedding_multiplier": 3.0,
    "mup_output_multiplier": 6.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", SIZES | {"dropout": 0.0}),
    "gpt2, untied": ("gpt2", SIZES | {"dropout": 0.0, "tied": False}),
    "llama, tied": ("llama", LLAMA | {"tied": True}),
    "qwen2": ("llama", LLAMA | {"qkv_bias": True}),
    "qwen3": ("llama", LLAMA | {"qk_norm": True, "head_dim": 16, "tied": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    builder, options = MODELS[name]
    model = {"builder": f"meshwright_models.{builder}:build", "options": options | MUP}
    config = made(
        tmp_path, model=model, train={"dtype": "float32"}, optimizer={"learning_rate": 0.05}
    )
    with meshwright.open_run(config) as run:
        run.take_step()
        run.save()
    result = export_checkpoint(tmp_path / "own", tmp_path / "out")
    assert "muP's multipliers are in the weights: embeddings x 3, q x 0." in " ".join(result.notes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    ours = load_plain(tmp_path / "own")[1]
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(ids)
        assert expected.std() > 0.05
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_imported_weights_have_no_multipliers(tmp_path: Path) -> None:
    config = made(
        tmp_path,
        model={"options": MODELS["gpt2"][1] | {"mup_base_size": 32}},
        train={"dtype": "float32"},
    )
    with meshwright.open_run(config) as run:
        run.take_step()
        run.save()
    assert not [
        note
        for note in export_checkpoint(tmp_path / "own", tmp_path / "out").notes
        if "muP" in note
    ]
    with pytest.raises(
        ConfigError,
        match="mup_base_size = 16",
        check=has_code("MW-INTEROP-098"),
    ) as caught:
        import_model(tmp_path / "out", tmp_path / "back", ["--model.options.mup_base_size=16"])
    assert caught.value.code == "MW-INTEROP-098"


def test_adapters_of_an_embedding_have_its_multiplier(tmp_path: Path) -> None:
    """The exported base has it: W + B A of the files for peft is the merged export."""
    options = LLAMA | MUP | {"tied": False, "moe": "none"}
    model = {"builder": "meshwright_models.llama:build", "options": options}
    adapter = {"rank": 2, "targets": ["embedding.tokens", "head"]}
    config = made(
        tmp_path,
        model=model,
        adapter=adapter,
        train={"dtype": "float32"},
        optimizer={"learning_rate": 0.05},
    )
    with meshwright.open_run(config) as run:
        for _ in range(2):
            run.take_step()
        run.save()
    files = {}
    for form in ("merged", "peft"):
        convert(tmp_path / "own", None, (form, str(tmp_path / form)), [], None, "float64", None)
        files[form] = load_file(next((tmp_path / form).glob("*.safetensors")))
    factors, name = files["peft"], "base_model.model.model.embed_tokens.lora_embedding_"
    change = (factors[f"{name}B"] @ factors[f"{name}A"]).t()
    merged = files["merged"]["model.embed_tokens.weight"]
    assert change.abs().max() > 1e-4
    with open_checkpoint(find(tmp_path / "own")[0].path) as checkpoint:
        base = checkpoint.read(
            TensorKind.WEIGHTS, ParameterInfo("embedding.tokens.weight", (64, 32))
        )
    assert base is not None
    torch.testing.assert_close(3 * base.double() + change, merged, rtol=0, atol=1e-6)
