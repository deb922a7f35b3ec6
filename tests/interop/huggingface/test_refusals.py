"""What cannot be restructured is refused with one message that names the reason;
no path opens a connection.
"""

from __future__ import annotations

import builtins
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import load
from meshwright.errors import ConfigError, ModelError, UserError
from meshwright.model.build import build_model
from meshwright.verify import layout_config, parse_layout
from meshwright_interop.huggingface.restructure.blocks import merge_blocks
from meshwright_interop.huggingface.restructure.bounds import check_fields
from meshwright_interop.huggingface.restructure.derived import DerivedSkeleton
from meshwright_interop.huggingface.restructure.directory import (
    configuration,
    fields_of,
    return_logits_alone,
    with_overrides,
)
from meshwright_interop.huggingface.restructure.frame import ModelSkeleton
from tests.interop.huggingface.architectures import directory, run_config
from tests.support.errors import has_code
from tests.support.plain import plain_layers


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing in this file may open one."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a connection was asked for: {args} {kwargs}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield


def said(path: Path, **options: Any) -> str:
    """The whole message of the refusal."""
    with pytest.raises(ModelError) as found:
        build_model(f"hf:{path}", options, 1)
    return str(found.value)


def changed(path: Path, **keys: Any) -> Path:
    """Keys of the config.json, set."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return path


def drawn(path: Path, layout: str, **options: Any) -> None:
    """Drawn as a run, without ranks."""
    config = run_config(path, model={"options": options})
    draw_blueprint(layout_config(config, parse_layout(layout), 4, "float64"))


def test_the_sockets_are_blocked() -> None:
    with pytest.raises(AssertionError, match="a connection was asked for"):
        socket.create_connection(("huggingface.co", 443))


def test_a_model_is_built_and_run_without_a_connection(tmp_path: Path) -> None:
    layers = plain_layers(
        build_model(f"hf:{directory('qwen3', tmp_path, weights=True)}", {}, 1), torch.float32
    )
    assert layers(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 67)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory("llama", tmp_path)
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert "pip install transformers" in said(path)


def test_a_path_that_is_no_directory_of_a_model(tmp_path: Path) -> None:
    assert "opens no network: download it first (hf download meta-llama/Llama-3.1-8B" in said(
        Path("meta-llama/Llama-3.1-8B")
    )
    assert f"{tmp_path / 'config.json'} is missing" in said(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not valid JSON" in said(tmp_path)
    assert f'model.builder = "hf:{tmp_path}/config.json": {tmp_path}/config.json is a file' in said(
        tmp_path / "config.json"
    )


@pytest.mark.long
def test_architectures_that_have_no_place_here(tmp_path: Path) -> None:
    llama = directory("llama", tmp_path)
    assert "is no architecture of transformers" in said(changed(llama, model_type="lama"))
    assert "did you mean 'llama'" in said(llama)
    own = said(
        changed(llama, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    )
    assert "modeling_mine.Mine" in own and "which is not run" in own
    endless = directory("mamba2", tmp_path)
    assert '"__float__": "Infinity"' in (endless / "config.json").read_text(), (
        "as transformers writes an infinity"
    )
    assert "Mamba2" in repr(build_model(f"hf:{endless}", {}, 1).layers)
    assert "t5 is an encoder-decoder" in said(
        changed(directory("llama", tmp_path), model_type="t5", is_encoder_decoder=True)
    )
    decoder = directory("marian", tmp_path, is_encoder_decoder=True)
    assert "model.options.is_encoder_decoder = false takes its decoder alone" in said(decoder)
    assert "MarianDecoderLayer" in repr(
        build_model(f"hf:{decoder}", {"is_encoder_decoder": False}, 1).layers
    )
    assert "its forward fails on meta tensors" in said(directory("jetmoe", tmp_path))
    assert build_model(f"hf:{directory('recurrent_gemma', tmp_path)}", {}, 1), (
        "weights of three dims, and no experts"
    )
    assert "no causal language model of this architecture" in said(directory("vit", tmp_path))
    quantized = changed(directory("llama", tmp_path), quantization_config={"quant_method": "gptq"})
    assert "the weights are quantised (gptq)" in said(quantized)


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        (
            "llama",
            {"num_key_value_heads": 3},
            "The size of tensor a (4) must match the size of tensor b (3)",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "k not in range for dimension"),
        ("gptj", {"rotary_dim": 5}, "Attempting to broadcast a dimension of length 6"),
        (
            "falcon",
            {"num_kv_heads": 3, "new_decoder_architecture": True},
            "shape '[2, 4, -1, 3, 8]' is invalid",
        ),
    ],
)
def test_a_model_that_transformers_cannot_run_either(
    kind: str, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The restructuring was blamed for it, or the layers' shapes once the stages were cut."""
    found = said(changed(directory(kind, tmp_path), **keys))
    assert "MW-INTEROP-147" in found and len(found.splitlines()) == 1 and len(found) < 600
    assert (
        "transformers itself cannot run this model" in found
        and "fails on token ids" in found
        and reason in found
    )


def test_a_model_that_only_the_cut_cannot_run_is_not_blamed_on_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (ModelSkeleton, DerivedSkeleton):
        monkeypatch.setattr(kind, "find_order", lambda self: 1 / 0)
    found = said(directory("llama", tmp_path))
    assert "MW-INTEROP-075" in found and "ZeroDivisionError" in found and "itself" not in found


def test_a_loss_of_routers_of_another_form(tmp_path: Path) -> None:
    """With it the computations of the last layer failed on outputs of the routers that no piece
    of the model has.
    """
    path = directory("jetmoe", tmp_path)
    for place, found in (
        ("model.options.output_router_logits = true", said(path, output_router_logits=True)),
        (
            f"{path}/config.json: output_router_logits = true",
            said(changed(path, output_router_logits=True)),
        ),
    ):
        assert found.startswith(place) and "aux_loss_coef = 0.01" in found
        assert "MW-INTEROP-148" in found
        assert "set model.options.output_router_logits = false" in found


def test_the_loss_of_the_routers_may_be_left_out(tmp_path: Path) -> None:
    path = changed(directory("mixtral", tmp_path), output_router_logits=True)
    build_model(f"hf:{path}", {"output_router_logits": False}, 1)
    build_model(f"hf:{path}", {"router_aux_loss_coef": 0.0}, 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "bloom"])
def test_keys_of_the_output_s_form_do_not_change_the_logits(kind: str, tmp_path: Path) -> None:
    """``return_dict = false`` failed in each;
    other keys made transformers collect values that nobody reads.
    """
    path = directory(kind, tmp_path)
    ids = torch.arange(12).reshape(2, 6)
    plain = plain_layers(build_model(f"hf:{path}", {}, 1), torch.float32).eval()(ids)
    keys = {
        "return_dict": False,
        "use_cache": True,
        "output_attentions": True,
        "output_hidden_states": True,
    }
    if kind == "mixtral":
        keys |= {"output_router_logits": True, "router_aux_loss_coef": 0.0}
    changed(path, **keys)
    config = configuration(path, {})
    return_logits_alone(config)
    assert config.return_dict is True and not (config.use_cache or config.output_hidden_states)
    assert torch.equal(
        plain_layers(build_model(f"hf:{path}", {}, 1), torch.float32).eval()(ids), plain
    )


def test_options_are_keys_of_the_configuration(tmp_path: Path) -> None:
    path = directory("llama", tmp_path)
    assert "did you mean num_hidden_layers" in said(path, num_hiden_layers=2)
    assert "Expected" in said(
        path, num_hidden_layers="two"
    ) or "config.json: transformers rejects it" in said(path, num_hidden_layers="two")
    assert 'attention = "flash"' in said(path, attention="flash").replace("'", '"')
    assert len(build_model(f"hf:{path}", {"num_hidden_layers": 1}, 1).layers) == 4


def test_dropout_outside_of_the_layers(tmp_path: Path) -> None:
    """Biogpt drops elements of its embeddings in the forward that calls its layers; OPT those of
    tokens of all samples in one dim.
    """
    path = directory("biogpt", tmp_path, hidden_dropout_prob=0.1)
    text = said(path)
    assert "it also drops elements between its layers" in text
    assert "model.options.hidden_dropout_prob = 0.0" in text
    build_model(f"hf:{path}", {"hidden_dropout_prob": 0.0}, 1)
    text = said(directory("opt", tmp_path, dropout=0.2))
    assert "acts on (4, 32) for one sample of 4 tokens" in text


def test_dropped_probabilities_have_no_context_parallelism(tmp_path: Path) -> None:
    model = build_model(f"hf:{directory('llama', tmp_path, attention_dropout=0.1)}", {}, 1)
    assert "drops probabilities by a function" in model.impossible["cp"]


def test_frequencies_that_change(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "rope_type = 'dynamic' changes the rotary frequencies" in said(
        directory("llama", tmp_path, rope_parameters=rope)
    )


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        (
            "granite_swa",
            "tp2",
            "'local_params', which is not supported; this rules out parallel.tp = 2",
        ),
        ("gemma", "tp2,sequence", "its token embedding is no plain nn.Embedding"),
        (
            "llama",
            "tp8",
            "units (heads or groups of heads) that must stay whole, and parallel.tp = 8",
        ),
        (
            "granitemoe",
            "tp2,sequence",
            (
                "block0.layer (GraniteMoeDecoderLayer) may work on several tokens at a time, and has"
                " no entry in its plan"
            ),
        ),
        ("doge", "tp2", "which its plan shards: its gradient would be that of one rank's shard"),
    ],
)
def test_layouts_that_a_model_cannot_have(
    kind: str, layout: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, check=has_code("MW-RUN-004", "MW-TP-002")) as found:
        drawn(directory(kind, tmp_path), layout)
    assert message in str(found.value)


def test_weights_that_a_plan_leaves_out_and_splits_the_input_of(tmp_path: Path) -> None:
    """Of each head its own: nobody says that they are split with it."""
    path = directory("cohere", tmp_path, use_qk_norm=True)
    drawn(path, "pp2")
    with pytest.raises(
        UserError,
        match=r"self_attn.q_norm.weight \[4, 8\] ",
        check=has_code("MW-RUN-004"),
    ):
        drawn(path, "tp2")


def test_weights_that_are_damaged_or_of_another_model(tmp_path: Path) -> None:
    path = directory("llama", tmp_path, weights=True, shard="20KB")
    first = sorted(path.glob("model-*.safetensors"))[0]
    kept = first.read_bytes()
    first.unlink()
    assert f"{first} is missing: model.safetensors.index.json has" in said(path)
    first.write_bytes(kept[:100])
    assert f"{first}: not a whole safetensors file" in said(path)
    first.write_bytes(kept)
    assert "has shape [64, 32], and the model needs [96, 32]" in said(path, intermediate_size=96)

    whole = directory("qwen2", tmp_path, weights=True)
    file = whole / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, file)
    assert "tensor model.layers.0.input_layernorm.weight [32] is in none of the files" in said(
        whole
    )
    save_file(tensors | {"model.more": torch.zeros(2)}, file)
    assert "tensor model.more [2] is not of a Qwen2ForCausalLM" in said(whole)
    save_file(tensors | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, file)
    assert f"{file}: tensor model.norm.weight is of I8: only F32, BF16, F16 are read" in said(whole)
    file.rename(whole / "pytorch_model.bin")
    assert "has its weights in pickled files only (pytorch_model.bin)" in said(whole)
    build_model(f"hf:{whole}", {"weights": False}, 1)
    (whole / "pytorch_model.bin").unlink()
    assert "holds no *.safetensors" in said(whole, weights=True)


def test_a_tied_head_that_is_another_matrix(tmp_path: Path) -> None:
    """transformers then takes both as they are;
    to go on with the embedding's numbers would be another model.
    """
    path = directory("qwen3", tmp_path, weights=True, tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, file)
    build_model(f"hf:{path}", {}, 1)
    save_file(tensors | {"lm_head.weight": head + 1}, file)
    assert f"{file}: tensor lm_head.weight differs from model.embed_tokens.weight" in said(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": ["llama"]}, "model_type = ['llama'] is no architecture of transformers"),
        ({"model_type": "lama", "auto_map": "x"}, "did you mean 'llama'?"),
        ({"quantization_config": "int4"}, "the weights are quantised (int4)"),
        ({"text_config": "x"}, "transformers rejects it: 'str' object has no attribute"),
        (
            {"num_hidden_layers": 10**11},
            "num_hidden_layers = 100000000000: a whole number from 1 to 512 is needed",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: a whole number from 1 to 512 is needed"),
        (
            {"num_hidden_layers": -1},
            "num_hidden_layers = -1: a whole number from 1 to 512 is needed",
        ),
        (
            {"hidden_size": "wide"},
            "transformers rejects it: Validation error for field 'hidden_size': TypeError",
        ),
    ],
)
def test_a_configuration_with_nonsense_in_it(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = changed(directory("llama", tmp_path), **keys)
    found = said(path)
    assert f"{path}/config.json: " in found and message in found and len(found.splitlines()) == 1


HUGE = 10**9
OUT_OF_BOUNDS = {
    "llama": [
        *[
            {name: HUGE}
            for name in ("head_dim", "num_attention_heads", "hidden_size", "intermediate_size")
        ],
        *[
            {name: 0}
            for name in ("head_dim", "num_attention_heads", "num_key_value_heads", "rope_theta")
        ],
        *[{"rope_theta": value} for value in (-1.0, float("nan"), float("inf"), 1e308)],
        *[{"rms_norm_eps": value} for value in (0.0, -1e-5, float("nan"))],
        *[
            {"rope_scaling": {"rope_type": "linear", "factor": value}}
            for value in (0.0, -2.0, float("nan"), 1e308)
        ],
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"num_hidden_layers": 9999},
        {"text_config": {"num_hidden_layers": 9999}},
        {"hidden_size": 10**400},
    ],
    "mixtral": [{"num_local_experts": HUGE}, {"num_experts_per_tok": HUGE}],
}


@pytest.mark.parametrize(
    ("name", "keys"), [(name, keys) for name, all_ in OUT_OF_BOUNDS.items() for keys in all_]
)
def test_sizes_without_end_and_divisors_of_zero_are_named(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Each would take hours, all memory, or give NaN in the first step."""
    found = said(changed(directory(name, tmp_path), **keys))
    assert (
        next(iter(keys)) in found
        and "is needed" in found
        and "MW-INTEROP-055" in found
        and len(found) < 600
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [("gptj", {"n_positions": HUGE}), ("gpt_neo", {"max_position_embeddings": 10**6})],
)
def test_a_buffer_without_end_is_counted_before_it_is_filled(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    fields = {
        "model_type": name,
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 4,
    }
    if name == "gpt_neo":
        fields = {
            "model_type": name,
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
        }
        fields["attention_types"] = [[["global", "local"], 1]]
    (path / "config.json").write_text(json.dumps(fields | keys))
    found = said(path)
    assert "building it would fill a tensor of 1,000,000,000" in found and "MW-INTEROP-145" in found


def test_models_of_a_trillion_parameters_are_within_the_bounds() -> None:
    """Fields of Llama-3.1-405B, Kimi-K2, Llama 4 and Switch."""
    fields: dict[str, Any]
    for fields in (
        {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        },
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "n_routed_experts": 384,
            "kv_lora_rank": 512,
            "head_dim": 192,
        },
        {
            "max_position_embeddings": 10_485_760,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 16.0},
        },
        {
            "num_experts": 2048,
            "vocab_size": 262_208,
            "sliding_window": None,
            "time_step_limit": [0.0, float("inf")],
        },
        {
            "layer_types": ["full_attention"] * 126,
            "pad_token_id": -1,
            "mtp_num_layers": 0,
            "num_mtp_heads": 0,
        },
    ):
        check_fields(fields, {}, "config.json")


def test_the_key_takes_a_directory_or_a_function(tmp_path: Path) -> None:
    for builder, fits in (
        ("hf:some/where", True),
        ("meshwright_models.gpt2:build", True),
        ("hf:", False),
        ("meshwright_models.gpt2", False),
    ):
        file = tmp_path / "run.toml"
        file.write_text(
            f'[model]\nbuilder = "{builder}"\n[data]\ntrain ='
            ' "x"\n[batch]\nmicro_batch_size=1\nchunks=1\n'
        )
        if fits:
            assert load(file, []).model.builder == builder
        else:
            with pytest.raises(ConfigError, match="builder", check=has_code("MW-CONFIG-020")):
                load(file, [])


def test_no_key_of_a_configuration_leads_to_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of its own and kernels of the hub: as if they stood in no config.json,
    at the top or in a table of it.
    """
    from meshwright_interop.huggingface.restructure.directory import LEADING_TO_CODE, configuration

    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    path = directory("llama", tmp_path)
    (path / "code.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    kernel = dict.fromkeys(LEADING_TO_CODE - {"auto_map"}, "stranger/kernel:run")
    changed(path, auto_map=own, **kernel)
    found = configuration(path, {})
    assert not hasattr(found, "auto_map") and "stranger" not in repr(vars(found))
    build_model(f"hf:{path}", {"weights": False}, 1)
    assert "has no such key" in said(path, attn_implementation="stranger/kernel:run")
    assert "has no such key" in said(path, auto_map=own)
    assert not (tmp_path / "canary").exists()


def test_sampled_experts(tmp_path: Path) -> None:
    """PhiMoE draws its experts in training: by a Gumbel variable of the process' generator."""
    assert "draws random numbers in training (exponential_)" in said(directory("phimoe", tmp_path))


def test_an_entry_of_some_blocks_does_not_match_a_module_of_another() -> None:
    """The first block has a dense MLP, whose input sequence parallelism gathers;
    that of the others holds experts.
    """
    layers = nn.Sequential()
    for name in ("block0", "block1"):
        layers.add_module(name, nn.ModuleDict({"mlp": nn.Identity(), "attention": nn.Identity()}))
    layers.block0["dense"] = nn.Identity()  # type: ignore[index, operator]
    both = {
        "block0.attention": "gather",
        "block1.attention": "gather",
        "block0.dense": "row",
        "head": "vocab",
    }
    merged = {"block*.attention": "gather", "block*.dense": "row", "head": "vocab"}
    assert merge_blocks(both, layers) == merged
    assert merge_blocks({**both, "block0.mlp": "gather"}, layers) == {
        **merged,
        "block0.mlp": "gather",
    }


def test_an_option_does_not_hide_tensors_that_the_model_lacks(tmp_path: Path) -> None:
    """Files with biases under ``attention_bias = false`` lost them as soon
    as any option was given.
    """
    path = directory("llama", tmp_path, weights=True, attention_bias=True)
    changed(path, attention_bias=False)
    message = "self_attn.k_proj.bias [16] is not of a LlamaForCausalLM"
    assert message in said(path) and message in said(path, rms_norm_eps=1e-5)
    changed(path, attention_bias=True)
    assert len(build_model(f"hf:{path}", {"num_hidden_layers": 1}, 1).layers) == 4


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
OLDER = {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
"""Fields of files that transformers 4 wrote;
a convert of ours writes them beside the newer ones.
"""
NEWER = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
BOTH = {"rope_theta": 5e5, "rope_scaling": NEWER["rope_parameters"]} | NEWER


@pytest.mark.parametrize("file", [OLDER, NEWER, BOTH], ids=["older", "newer", "both"])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_rotary_table_replaces_the_file_s_in_either_form(
    tmp_path: Path, file: dict[str, Any], name: str
) -> None:
    path = tmp_path / "llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | file))
    assert configuration(path, {name: LINEAR}).rope_parameters == LINEAR
    without = {key: value for key, value in LINEAR.items() if key != "rope_theta"}
    assert configuration(path, {name: without}).rope_parameters == LINEAR | {"rope_theta": 5e5}
    assert configuration(path, {"rope_theta": 7e6}).rope_parameters["rope_theta"] == 7e6
    export = with_overrides(fields_of(path), {name: LINEAR})
    (path / "config.json").write_text(json.dumps(export))
    assert configuration(path, {}).rope_parameters == LINEAR


def test_one_rope_theta_for_several_rotary_tables_is_refused(tmp_path: Path) -> None:
    path = directory("gemma3_text", tmp_path)
    with pytest.raises(
        ModelError,
        match=r"rope_theta = 5000.0 ",
        check=has_code("MW-INTEROP-128"),
    ):
        configuration(path, {"rope_theta": 5e3})
