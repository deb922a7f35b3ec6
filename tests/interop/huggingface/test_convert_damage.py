"""What is damaged, does not fit or would change numbers is refused by file and tensor,
and nothing is left behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import find
from meshwright.errors import UserError
from meshwright_interop.huggingface.convert.decoders import read_llama, read_mistral
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.importing import import_model
from meshwright_interop.huggingface.convert.settings import Settings
from tests.interop.huggingface import theirs
from tests.interop.huggingface.conftest import Written
from tests.interop.huggingface.test_convert_families import files, same_bits
from tests.support.errors import has_code


class Usage(NamedTuple):
    """Of a disk."""

    total: int
    free: int


Write = Callable[..., Written]


@pytest.fixture
def source(written: Write, tmp_path: Path) -> Path:
    """A Llama in four files, to be spoiled."""
    shutil.copytree(written("llama 3.1")[0], tmp_path / "model")
    return tmp_path / "model"


def refused(source: Path) -> str:
    """What is said; and that nothing has been written."""
    run = source.parent / "run"
    with pytest.raises(UserError) as raised:
        import_model(source, run)
    assert not run.exists() and not list(source.parent.glob(".tmp-*"))
    return str(raised.value)


def index_of(source: Path) -> tuple[dict[str, str], Path]:
    path = source / "model.safetensors.index.json"
    return json.loads(path.read_text())["weight_map"], path


def change_file(source: Path, tensor: str, change: Callable[[dict[str, Any]], None]) -> str:
    """Rewrite the file that holds a tensor; its name."""
    name = index_of(source)[0][tensor]
    tensors = load_file(source / name)
    change(tensors)
    save_file(tensors, source / name)
    return name


def change_config(source: Path, **fields: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_file_of_the_index(source: Path) -> None:
    name = index_of(source)[0][NORM]
    (source / name).unlink()
    said = refused(source)
    assert (
        f"{source / name} is missing: model.safetensors.index.json has " in said
        and "get the file again" in said
    )


def test_a_file_cut_short(source: Path) -> None:
    name = index_of(source)[0][NORM]
    whole = (source / name).read_bytes()
    (source / name).write_bytes(whole[:-7])
    assert f"{source / name}: not a whole safetensors file" in refused(source)


def test_a_tensor_that_is_not_where_the_index_has_it(source: Path) -> None:
    name = change_file(source, NORM, lambda tensors: tensors.pop(NORM))
    said = refused(source)
    assert (
        f"{source / name}: has no tensor {NORM}, which model.safetensors.index.json has there"
        in said
    )


def test_an_index_that_leads_elsewhere(source: Path) -> None:
    placed, path = index_of(source)
    path.write_text(json.dumps({"weight_map": placed | {NORM: "../other.safetensors"}}))
    assert "'../other.safetensors' is no plain name" in refused(source)
    path.write_text("{")
    assert f"{path}: not valid JSON" in refused(source)
    path.write_text("{}")
    assert f'{path}: it has no "weight_map"' in refused(source)


def test_a_tensor_of_another_shape_one_too_few_and_one_too_many(source: Path) -> None:
    placed, path = index_of(source)
    name = change_file(source, NORM, lambda tensors: tensors.update({NORM: torch.ones(31)}))
    extra = "model.layers.3.input_layernorm.weight"
    other = change_file(
        source, "model.norm.weight", lambda tensors: tensors.update({extra: torch.ones(32)})
    )
    lost = "model.layers.0.self_attn.k_proj.weight"
    change_file(source, lost, lambda tensors: tensors.pop(lost))
    path.write_text(
        json.dumps({"weight_map": {n: f for n, f in placed.items() if n != lost} | {extra: other}})
    )
    said = refused(source)
    assert f"{source / name}: tensor {NORM} has shape [31], and the model needs [32]" in said
    assert f"{source / other}: tensor {extra} [32] is not of a LlamaForCausalLM" in said
    assert f"tensor {lost} [16, 32] is in none of the files" in said
    assert "nothing is written" in said


def test_numbers_that_are_no_floats(source: Path) -> None:
    name = change_file(
        source, NORM, lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)})
    )
    assert f"{source / name}: tensor {NORM} is of I8: only F64, F32, F16, BF16 are read" in refused(
        source
    )
    change_config(source, quantization_config={"bits": 4})
    assert "config.json: the weights are quantised (some way)" in refused(source)


def test_mixed_types_are_kept_and_told(source: Path) -> None:
    def half(tensors: dict[str, Any]) -> None:
        for name in (NORM, "model.layers.1.self_attn.k_proj.weight"):
            if name in tensors:
                tensors[name] = tensors[name].bfloat16()

    for name in (NORM, "model.layers.1.self_attn.k_proj.weight"):
        change_file(source, name, half)
    done = import_model(source, source.parent / "run")
    assert (
        "28 F32, 2 BF16): each is kept as it is" in done.notes[0] and '"bfloat16"' in done.notes[0]
    )
    assert (
        "self_attn.k_proj.weight" in done.notes[1]
        and "in the wider of BF16 and F32" in done.notes[1]
    )
    dtypes = {name: entry.dtype for name, entry in done.manifest.tensors.items()}
    assert dtypes["weights/block1.attention_norm.weight"] == "BF16"
    assert dtypes["weights/block1.attention.qkv.weight"] == "F32"
    taken = export_checkpoint(done.path, source.parent / "out")  # two types in one file
    assert taken.dtypes == ["bfloat16", "float32"]
    expected = files(source)
    expected["model.layers.1.self_attn.k_proj.weight"] = expected[
        "model.layers.1.self_attn.k_proj.weight"
    ].float()
    same_bits(files(taken.path), expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"model_type": "mamba"},
            'model_type "mamba" is not supported; supported: gpt2, llama, mistral, qwen2, qwen3',
        ),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported, only "silu"'),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_scaling: rope_type = "linear" is not supported, only "default", "llama3", "yarn":',
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported, only 1.0"),
        (
            {"num_hidden_layers": "three"},
            'num_hidden_layers = "three": a whole number from 1 up is needed',
        ),
        ({"hidden_size": None}, "hidden_size is missing: a whole number from 1 up is needed"),
        ({"num_key_value_heads": 3}, "num_heads=4 over num_kv_heads=3 groups"),
        (
            {"original_max_position_embeddings": 32},
            "original_max_position_embeddings = 16, and 32 outside of it",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "full_attention: rotary settings per layer",
        ),
        (
            {"rope_parameters": None, "rope_theta": 1e-320},
            "rope_theta = 1e-320: a number from 0.001 up is needed",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN: a number from 1e-30 up is needed"),
        ({"attention_dropout": 1.5}, "attention_dropout = 1.5: a number from 0 to 1 is needed"),
        (
            {"num_hidden_layers": 10**11},
            "num_hidden_layers = 100000000000: a whole number from 1 to 10000 is needed",
        ),
        (
            {"hidden_size": 2**31},
            "hidden_size = 2147483648: a whole number from 1 to 1048576 is needed",
        ),
        ({"is_causal": False}, "is_causal = false is not supported, only true"),
        (
            {"eos_token_id": [1, "x"]},
            'eos_token_id = [1, "x"]: the number of a token is needed, or null',
        ),
        (
            {"bos_token_id": -(10**30)},
            "bos_token_id = -1000000000000000000000000000000: the number of a token",
        ),
    ],
)
def test_a_config_that_would_give_other_numbers(
    fields: dict[str, Any], said: str, source: Path
) -> None:
    change_config(source, **fields)
    found = refused(source)
    assert said in found
    assert str(source / "config.json") in found or "model.options" in found


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("gpt2", {"activation_function": "relu"}, 'activation_function = "relu" is not supported'),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = true is not supported",
        ),
        (
            "gpt2",
            {"num_attention_heads": 8},
            "num_attention_heads = 8 and n_head = 4 are one field under two names",
        ),
        (
            "t5",
            {"feed_forward_proj": "gated-silu"},
            'feed_forward_proj = "gated-silu" is not supported',
        ),
        ("t5", {"is_gated_act": True}, "is_gated_act = true is not supported, only false"),
        (
            "t5",
            {"dense_act_fn": "gelu_new"},
            'dense_act_fn = "gelu_new" is not supported, only "relu"',
        ),
        (
            "t5",
            {"relative_attention_max_distance": 10**11},
            "a whole number from 1 to 1048576 is needed",
        ),
        (
            "mistral, window",
            {"sliding_window": True},
            "sliding_window = true: a whole number from 1 up is needed",
        ),
        (
            "qwen2",
            {"num_hidden_layers": 10**11, "layer_types": ["x"]},
            "a whole number from 1 to 10000 is needed",
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 6,
                "max_window_layers": 1,
                "layer_types": None,
            },
            "some layers see a window",
        ),
        ("mistral, window", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (
            "gpt2",
            {"tie_word_embeddings": False},
            "tensor lm_head.weight [99, 32] is in none of the files",
        ),
    ],
)
def test_other_families_too(
    name: str, fields: dict[str, Any], said: str, written: Write, tmp_path: Path
) -> None:
    shutil.copytree(written(name)[0], tmp_path / "model")
    change_config(tmp_path / "model", **fields)
    assert said in refused(tmp_path / "model")


def test_a_tied_head_that_is_another_matrix(source: Path) -> None:
    change_config(source, tie_word_embeddings=True)
    name = index_of(source)[0]["lm_head.weight"]
    said = refused(source)
    assert f"{source / name}: tensor lm_head.weight differs from model.embed_tokens.weight" in said
    assert "set tie_word_embeddings to false" in said


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(source: Path) -> None:
    theirs.tokenizer(theirs.VOCAB + 2).save(str(source / "tokenizer.json"))
    said = refused(source)
    assert (
        f"{source / 'tokenizer.json'} does not fit the model: its token 'w100' is number 100, one"
        " of 2 beyond" in said
    )
    assert f"{source / 'config.json'} has vocab_size = 99" in said
    theirs.tokenizer(90).save(str(source / "tokenizer.json"))
    done = import_model(source, source.parent / "run")
    assert done.notes == [
        "tokenizer.json has 90 tokens, the model has 99 rows: the remaining rows are unused"
    ]
    # and on the way out: a tokenizer that was put in its place meanwhile
    theirs.tokenizer(120).save(str(source.parent / "run/huggingface/tokenizer.json"))
    with pytest.raises(
        UserError,
        match=r"'w119' .* 119, .* 21 ",
        check=has_code("MW-INTEROP-040"),
    ):
        export_checkpoint(done.path, source.parent / "out")
    assert not (source.parent / "out").exists()


def test_without_a_tokenizer_it_says_so(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    done = import_model(source, source.parent / "run")
    assert "tokenizer.json is missing: the run has no data.tokenizer" in done.notes[0]
    assert done.config.data.tokenizer is None
    assert (
        "there is no tokenizer.json beside it"
        in export_checkpoint(done.path, source.parent / "out").notes[0]
    )


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_companion_that_is_damaged(name: str, source: Path) -> None:
    """On the way in, and not weeks later on the way out."""
    (source / name).write_text('{"eos_token_id": 1')
    assert f"{source / name}: not valid JSON" in refused(source)


def test_numbers_of_tokens_that_no_tokenizer_has(source: Path) -> None:
    """What generation_config.json says of them is kept, and looked up only where it can be."""
    (source / "generation_config.json").write_text(
        f'{{"eos_token_id": {10**30}, "bos_token_id": -5}}'
    )
    taken = export_checkpoint(
        import_model(source, source.parent / "run").path, source.parent / "out"
    )
    assert json.loads((taken.path / "generation_config.json").read_text())["eos_token_id"] == 10**30


def test_pickled_weights_are_refused_with_the_next_move(source: Path) -> None:
    for file in source.glob("*.safetensors*"):
        file.unlink()
    assert (
        "neither model.safetensors nor model.safetensors.index.json: the weights are missing"
        in refused(source)
    )
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    said = refused(source)
    assert (
        "pickled files only (pytorch_model.bin), which can run code" in said
        and "save_pretrained" in said
    )


def test_places_that_are_no_model_or_cannot_take_a_run(
    source: Path, written: Write, tmp_path: Path
) -> None:
    assert "there is no directory" in refused(tmp_path / "nothing") and "hf download" in refused(
        tmp_path / "nothing"
    )
    assert "is a file: give the directory" in refused(source / "config.json")
    (source / "config.json").unlink()
    assert f"{source / 'config.json'} is missing" in refused(source)
    (source / "adapter_config.json").write_text("{}")
    assert "holds an adapter" in refused(source) and "merge_and_unload" in refused(source)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(
        UserError,
        check=has_code("MW-INTEROP-042"),
    ):
        import_model(written("gpt2")[0], taken)
    done = import_model(written("gpt2")[0], tmp_path / "gpt2")
    with pytest.raises(
        UserError,
        check=has_code("MW-INTEROP-042"),
    ):
        export_checkpoint(done.path, taken)
    assert [found.name for found in taken.iterdir()] == ["notes.txt"]


def test_what_cannot_be_taken_away(written: Write, tmp_path: Path) -> None:
    done = import_model(written("gpt2")[0], tmp_path / "run")
    shard = next(done.path.glob("*.safetensors"))
    spoiled = bytearray(shard.read_bytes())
    spoiled[-3] ^= 1
    shard.write_bytes(bytes(spoiled))
    with pytest.raises(
        UserError,
        check=has_code("MW-CHECKPOINT-016"),
    ):
        export_checkpoint(find(tmp_path / "run")[0].path, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp-*"))


def test_a_write_that_fails_leaves_nothing(
    written: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither way: what was written before the failure goes, too."""
    path, _ = written("gpt2")
    done = import_model(path, tmp_path / "run")
    (tmp_path / ".tmp-out-0123abcd").mkdir()  # of one that was killed

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("meshwright_interop.huggingface.convert.exporting.side_files.write", fail)
        with pytest.raises(UserError, check=has_code("MW-CHECKPOINT-003")):
            export_checkpoint(done.path, tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("meshwright_interop.huggingface.convert.importing.write_snapshot", fail)
        with pytest.raises(UserError, check=has_code("MW-CHECKPOINT-003")):
            import_model(path, tmp_path / "again")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: Usage(total=10**9, free=1000))
        with pytest.raises(
            UserError,
            match=r"has 1,000 bytes free, and [\d,]+ are to be written",
            check=has_code("MW-INTEROP-043"),
        ):
            export_checkpoint(done.path, tmp_path / "out")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["run"]


def test_released_configurations_of_windows_and_biases() -> None:
    """Fields as they stand in files of the released models."""

    def options(read: Callable[[Settings], dict[str, Any]], **fields: Any) -> dict[str, Any]:
        settings = Settings(theirs.SIZES | fields, "config.json")
        found = read(settings)
        settings.end()
        return found

    assert options(read_mistral)["sliding_window"] == 4096  # 7B v0.1 by default
    assert "sliding_window" not in options(read_mistral, sliding_window=None)  # v0.2 and later
    assert options(read_mistral, head_dim=16)["head_dim"] == 16  # Nemo
    assert "head_dim" not in options(read_llama, head_dim=8)
    assert options(read_llama)["rope_theta"] == 10_000.0
    assert options(read_llama, attention_bias=True)["out_bias"]


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer_config.json"])
def test_a_side_file_that_is_a_link_out_of_the_directory(source: Path, name: str) -> None:
    """The run and its exports would hold a copy of a file of this machine."""
    (source.parent / "secret").write_text("{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(source.parent / "secret")
    said = refused(source)
    assert (
        f"{source / name} is a link to {source.parent / 'secret'}, a file of another name" in said
    )


def test_links_of_the_hub_s_cache_are_followed(source: Path) -> None:
    home = source.parent / "models--x"
    (home / "snapshots").mkdir(parents=True)
    source = source.rename(home / "snapshots" / "abc")
    (home / "blobs").mkdir()
    (source / "merges.txt").unlink(missing_ok=True)
    (home / "blobs" / "1f").write_text("a b")
    (source / "merges.txt").symlink_to("../../blobs/1f")
    import_model(source, home / "run")
    assert (home / "run" / "huggingface" / "merges.txt").read_text() == "a b"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_half_a_character(source: Path, name: str) -> None:
    """Python's JSON reads it, and no export could write it."""
    (source / name).write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"x": "\ud800"})
    )
    assert rf"{source / name}: \ud800 is half a character" in refused(source)


def test_numbers_beyond_the_element_type_of_an_export(written: Write, tmp_path: Path) -> None:
    shutil.copytree(written("llama 2")[0], tmp_path / "theirs")
    change_file(tmp_path / "theirs", NORM, lambda tensors: tensors[NORM].fill_(-1e5))
    done = import_model(tmp_path / "theirs", tmp_path / "run", ["--train.dtype=float32"])
    with pytest.raises(
        UserError,
        match=rf"{NORM} has numbers up to 1e\+05, beyond float16, whose largest is",
        check=has_code("MW-INTEROP-125"),
    ):
        export_checkpoint(done.path, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    export_checkpoint(done.path, tmp_path / "out", dtype="bfloat16")
