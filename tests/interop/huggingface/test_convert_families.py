"""In and out, each family: logits equal to those of transformers, tensors bit for bit,
files that it opens again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.checkpoint import find
from meshwright.errors import ModelError
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.importing import import_model
from tests.end_to_end.driving import differing, tensors
from tests.interop.huggingface import theirs
from tests.interop.huggingface.conftest import Written
from tests.interop.huggingface.theirs import CASES
from tests.support.errors import has_code
from tests.support.marks import marked_rows
from tests.support.plain import load_plain

Write = Callable[..., Written]


def files(path: Path) -> dict[str, Tensor]:
    """Every tensor of a directory in their form."""
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, types and numbers."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def some_ids(model: Any) -> Tensor:
    """Two samples longer than any window of the cases; the first of an encoder ends in padding."""
    ids = torch.randint(1, theirs.VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    if model.config.is_encoder_decoder:
        ids[0, -5:] = 0
    return ids


@marked_rows(
    "long",
    "qwen2, window",
    "qwen3_moe",
    "qwen3_moe, first block dense",
    "t5, version 1.1",
    "t5, tied, not scaled",
)
@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_transformers_and_it_comes_back_bit_for_bit(
    name: str, written: Write, tmp_path: Path
) -> None:
    import transformers

    path, model = written(name)
    assert len(list(path.glob("*.safetensors"))) > 1, "in several files"
    brought = import_model(path, tmp_path / "run")
    assert brought.notes == []
    ids = some_ids(model)
    expected = theirs.logits(model, ids)
    _, layers = load_plain(tmp_path / "run")
    found = theirs.our_logits(layers, ids, model.config.is_encoder_decoder)
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() < 1e-5

    # theirs -> ours -> theirs
    taken = export_checkpoint(brought.path, tmp_path / "out", shard_bytes=30_000)
    assert len(taken.files) > 1
    same_bits(files(taken.path), files(path))
    again, report = getattr(transformers, CASES[name].model).from_pretrained(
        taken.path, output_loading_info=True
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    )
    assert torch.equal(theirs.logits(again.eval(), ids), expected)

    # ours -> theirs -> ours
    import_model(taken.path, tmp_path / "twice")
    assert not differing(tensors(tmp_path / "twice"), tensors(tmp_path / "run"))
    assert load_plain(tmp_path / "twice")[0].model == brought.config.model


def test_experts_are_stacked_in_parts(written: Write, tmp_path: Path) -> None:
    """A few experts of a tensor at a time, each part in a shard of its own: the same run,
    and the same files again.
    """
    path, _ = written("deepseek_v3, as Moonlight")
    whole = import_model(path, tmp_path / "run")
    parts = import_model(path, tmp_path / "parts", max_file_bytes=9_000)
    entry = parts.manifest.tensors["weights/block1.mlp.experts.gate_up"]
    assert entry.shape == (6, 24, 32) and len(entry.pieces) > 1
    assert len(whole.manifest.tensors["weights/block1.mlp.experts.gate_up"].pieces) == 1
    assert not differing(tensors(tmp_path / "parts"), tensors(tmp_path / "run"))
    same_bits(files(export_checkpoint(parts.path, tmp_path / "out").path), files(path))


def test_the_bias_of_a_choice_keeps_its_precision(written: Write, tmp_path: Path) -> None:
    """Files in bfloat16 have it in float32, and so has an export in bfloat16."""
    path, _ = written("deepseek_v3", torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    from safetensors.torch import save_file

    source = tmp_path / "source"
    shutil.copytree(path, source)
    bias = torch.linspace(-0.3, 0.3, 6)
    for file in source.glob("*.safetensors"):
        found = load_file(file)
        save_file(
            {key: bias if key == name else tensor for key, tensor in found.items()},
            file,
            {"format": "pt"},
        )
    brought = import_model(source, tmp_path / "run")
    assert any("several element types" in note for note in brought.notes)
    assert torch.equal(tensors(tmp_path / "run")["weights/block1.mlp.router.bias"], bias)
    taken = export_checkpoint(brought.path, tmp_path / "out", dtype="bfloat16")
    exported = files(taken.path)
    assert torch.equal(exported[name], bias) and exported["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = false is not supported"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "a latent attention has as many as num_attention_heads",
        ),
        (
            "mixtral",
            {"num_local_experts": 16384, "num_hidden_layers": 9999},
            "more than 262144 experts",
        ),
    ],
)
def test_mixtures_that_have_no_place_here(
    name: str, field: dict[str, Any], said: str, written: Write, tmp_path: Path
) -> None:
    shutil.copytree(written(name)[0], tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | field))
    with pytest.raises(ModelError, match=said, check=has_code("MW-INTEROP-038")) as caught:
        import_model(tmp_path / "model", tmp_path / "run")
    assert caught.value.code == "MW-INTEROP-038"


@pytest.mark.parametrize(
    ("name", "second"),
    [
        (
            "gpt2",
            {
                "n_embd": "hidden_size",
                "n_head": "num_attention_heads",
                "n_positions": "max_position_embeddings",
            },
        ),
        (
            "t5",
            {
                "d_kv": "head_dim",
                "num_heads": "num_attention_heads",
                "num_layers": "num_hidden_layers",
            },
        ),
    ],
)
def test_fields_under_their_second_names(
    name: str, second: dict[str, str], written: Write, tmp_path: Path
) -> None:
    """As transformers takes them: a number of heads that is left out would be another one,
    and fit all shapes.
    """
    shutil.copytree(written(name)[0], tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(
        json.dumps({second.get(field, field): value for field, value in fields.items()})
    )
    brought = import_model(tmp_path / "model", tmp_path / "run")
    assert (
        brought.config.model == import_model(written(name)[0], tmp_path / "other").config.model
        and not brought.notes
    )
    taken = json.loads(
        (export_checkpoint(brought.path, tmp_path / "out").path / "config.json").read_text()
    )
    assert {field: taken[field] for field in second} == {field: fields[field] for field in second}
    assert not second.values() & taken.keys()


def test_what_is_said_of_positions_is_said_once(written: Write, tmp_path: Path) -> None:
    """``original_max_position_embeddings`` beside rope_parameters,
    where transformers 5 looks first.
    """
    shutil.copytree(written("llama 3.1")[0], tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    fields = json.loads(config.read_text())
    length = fields["rope_parameters"].pop("original_max_position_embeddings")
    config.write_text(json.dumps(fields | {"original_max_position_embeddings": length}))
    brought = import_model(
        tmp_path / "model", tmp_path / "run", ["--model.options.rope_original_length=32"]
    )
    taken = json.loads(
        (export_checkpoint(brought.path, tmp_path / "out").path / "config.json").read_text()
    )
    assert taken["rope_parameters"]["original_max_position_embeddings"] == 32
    assert "original_max_position_embeddings" not in taken


@pytest.mark.parametrize("name", ["gpt2", "llama 3.1", "qwen2"])
def test_half_precision_stays_the_same_bits(name: str, written: Write, tmp_path: Path) -> None:
    path, _ = written(name, torch.bfloat16)
    brought = import_model(path, tmp_path / "run")
    assert brought.config.train.dtype == "bfloat16"
    assert {entry.dtype for entry in brought.manifest.tensors.values()} == {"BF16"}
    taken = export_checkpoint(brought.path, tmp_path / "out")
    assert list(taken.files) == ["model.safetensors"] and taken.dtypes == ["bfloat16"]
    same_bits(files(taken.path), files(path))
    assert json.loads((taken.path / "config.json").read_text())["dtype"] == "bfloat16"
    wide = export_checkpoint(brought.path, tmp_path / "wide", dtype="float32")
    same_bits(files(wide.path), {name: tensor.float() for name, tensor in files(path).items()})


def test_files_of_the_bare_model_and_tensors_that_carry_nothing(
    written: Write, tmp_path: Path
) -> None:
    """OpenAI's own file: no "transformer." before the names,
    and the masks of attention among the tensors.
    """
    from safetensors.torch import save_file

    path, _ = written("gpt2")
    bare = tmp_path / "bare"
    bare.mkdir()
    found = {name.removeprefix("transformer."): tensor for name, tensor in files(path).items()}
    found |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)}
    save_file(found, bare / "model.safetensors")
    (bare / "config.json").write_text((path / "config.json").read_text())
    import_model(bare, tmp_path / "bare-run")
    import_model(path, tmp_path / "run")
    assert not differing(tensors(tmp_path / "bare-run"), tensors(tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("t5", "shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")),
        ("qwen2", "model.embed_tokens.weight", ("lm_head.weight",)),
    ],
)
def test_a_tied_weight_under_any_of_its_names(
    name: str, first: str, others: tuple[str, ...], written: Write, tmp_path: Path
) -> None:
    """Which of the names a file has of it depends on what wrote it; it may have several, too."""
    from safetensors.torch import save_file

    path, _ = written(name)
    import_model(path, tmp_path / "run")
    for at, names in enumerate((others[-1:], (first, *others))):
        source = tmp_path / f"source{at}"
        source.mkdir()
        found = files(path)
        found |= dict.fromkeys(names, found.pop(first))
        save_file(
            {key: tensor.clone() for key, tensor in found.items()}, source / "model.safetensors"
        )
        (source / "config.json").write_text((path / "config.json").read_text())
        import_model(source, tmp_path / f"run{at}")
        assert not differing(tensors(tmp_path / f"run{at}"), tensors(tmp_path / "run"))


def test_both_ways_of_writing_positions(written: Write, tmp_path: Path) -> None:
    """transformers 4 says rope_theta and rope_scaling, 5 says rope_parameters; ours says both,
    alike.
    """
    path, _ = written("llama 3.1")
    new = json.loads((path / "config.json").read_text())
    rope = dict(new["rope_parameters"])
    old = {name: value for name, value in new.items() if name not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": "float32"}
    older = old | {
        "rope_scaling": {
            "type" if name == "rope_type" else name: value for name, value in rope.items()
        }
    }
    ways = []
    for at, fields in enumerate((new, old, older)):
        source = tmp_path / f"way{at}"
        source.mkdir()
        for file in path.iterdir():
            (source / file.name).symlink_to(file)
        (source / "config.json").unlink()
        (source / "config.json").write_text(json.dumps(fields))
        done = import_model(source, tmp_path / f"run{at}")
        assert done.notes == []
        written_back = json.loads(
            (export_checkpoint(done.path, tmp_path / f"out{at}").path / "config.json").read_text()
        )
        ways.append(
            (done.config.model, written_back["rope_parameters"], written_back["rope_scaling"])
        )
        assert written_back["rope_theta"] == 500000.0
    assert ways[0] == ways[1] == ways[2]
    assert (
        ways[0][0].options["rope_scaling_factor"] == 8.0
        and ways[0][0].options["rope_original_length"] == 16
    )


def test_what_a_config_says_besides_stays(written: Write, tmp_path: Path) -> None:
    """Fields that decide nothing here (ids of special tokens above all)
    go with the model and come back.
    """
    path, _ = written("qwen3")
    source = tmp_path / "source"
    source.mkdir()
    for file in path.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    fields = json.loads((path / "config.json").read_text()) | {
        "bos_token_id": 7,
        "eos_token_id": [8, 9],
        "mine": 3,
    }
    (source / "config.json").write_text(json.dumps(fields))
    (source / "generation_config.json").write_text('{"eos_token_id": [8, 9], "temperature": 0.6}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    done = import_model(source, tmp_path / "run")
    assert [note for note in done.notes if "mine = 3 is not known here" in note]
    out = export_checkpoint(find(tmp_path / "run")[0].path, tmp_path / "out").path
    back = json.loads((out / "config.json").read_text())
    assert {name: back[name] for name in ("bos_token_id", "eos_token_id", "mine")} == {
        "bos_token_id": 7,
        "eos_token_id": [8, 9],
        "mine": 3,
    }
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_a_model_of_ours_with_the_tokenizer_of_another(written: Write, tmp_path: Path) -> None:
    """data.tokenizer points into a directory of another model: its tokens go along,
    its numbers do not.
    """
    path, _ = written("gpt2")
    elsewhere = tmp_path / "llama"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text(
        '{"model_type": "llama", "rope_theta": 7.0, "eos_token_id": 5}'
    )
    (elsewhere / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
    (elsewhere / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "w3"}, "bos_token": "w2"}'
    )
    done = import_model(
        path, tmp_path / "run", [f"--data.tokenizer={elsewhere / 'tokenizer.json'}"]
    )
    shutil.rmtree(tmp_path / "run/huggingface")  # as of a run that began here
    back = json.loads(
        (export_checkpoint(done.path, tmp_path / "out").path / "config.json").read_text()
    )
    assert (back["model_type"], back["eos_token_id"], "rope_theta" in back) == ("gpt2", 5, False)
    (elsewhere / "config.json").unlink()
    back = json.loads(
        (export_checkpoint(done.path, tmp_path / "tokens").path / "config.json").read_text()
    )
    assert (back["bos_token_id"], back["eos_token_id"]) == (2, 3)
    (elsewhere / "tokenizer_config.json").unlink()
    out = export_checkpoint(done.path, tmp_path / "ours").path
    back = json.loads((out / "config.json").read_text())
    assert back["bos_token_id"] == back["eos_token_id"] == 0
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    (elsewhere / "tokenizer.json").unlink()
    back = json.loads(
        (export_checkpoint(done.path, tmp_path / "none").path / "config.json").read_text()
    )
    assert back["bos_token_id"] is None and back["eos_token_id"] is None


def test_modules_of_multi_token_prediction_are_not_made_up(written: Write, tmp_path: Path) -> None:
    path, _ = written("llama 3")
    with pytest.raises(
        ModelError,
        match=r"model.options.mtp_layers = 1: ",
        check=has_code("MW-INTEROP-097"),
    ) as caught:
        import_model(path, tmp_path / "run", ["--model.options.mtp_layers=1"])
    assert caught.value.code == "MW-INTEROP-097" and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "sets", "words"),
    [
        (
            "llama 3",
            ("moe.num_experts=4", "moe.top_k=2"),
            r"model\.options\.moe = \{'num_experts': 4",
        ),
        ("mixtral", ("moe=none",), r"model\.options\.moe = None"),
        (
            "mixtral",
            ("moe.shared_ffn_size=8", "moe.shared_gate=true"),
            r"first block0\.mlp\.shared_gate",
        ),
    ],
)
def test_options_of_another_architecture_are_refused(
    name: str, sets: tuple[str, ...], words: str, written: Write, tmp_path: Path
) -> None:
    """Experts for a dense model, none for a mixture, a gate that no file has."""
    path, _ = written(name)
    with pytest.raises(ModelError, match=words, check=has_code("MW-INTEROP-141")):
        import_model(path, tmp_path / "run", [f"--model.options.{each}" for each in sets])
