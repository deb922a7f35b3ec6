"""Forms that are neither GPT-2 nor Llama become options of the decoder,
and forms that are stay with these builders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.errors import ConfigError
from meshwright.model.build import build_model
from meshwright_interop.configs import DropReason, ImportedConfig, convert_file
from tests.interop.configs import dumps, samples
from tests.support.errors import has_code

YAML = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: 32
  --vocab-size: 128
  --micro-batch-size: 2
  --global-batch-size: 8
  --train-iters: 20
  --lr: 0.001
  --min-lr: 0.0001
  --data-path: ${DATA_PATH}/corpus_text_document
  --bf16: true
TEST_TYPE: regular
"""
"""A ``model_config.yaml`` of Megatron-LM's functional tests: GPT-2 without further flags."""
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def read(path: Path, text: str) -> ImportedConfig:
    path.write_text(text)
    found = convert_file(path)
    assert draw_blueprint(resolve(found.config)).stages  # the model can be built
    return found


def form(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Builder, and its options but for sizes that are in all of the files."""
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "max_sequence_length",
        "norm_eps",
        "tied",
    )
    others = {name: value for name, value in config.model.options.items() if name not in sizes}
    return config.model.builder.removeprefix("meshwright_models.").removesuffix(":build"), others


def with_flags(*flags: str) -> str:
    lines = [f"  --{flag}\n" if ":" in flag else f"  --{flag}: true\n" for flag in flags]
    return YAML.replace("TEST_TYPE", f"{''.join(lines)}TEST_TYPE")


LAYER_NORM = {
    "norm": "layer_norm",
    "positions": "learned",
    "mlp": "gelu_tanh",
    "ffn_size": 256,
    "dropout": 0.1,
}
ROTARY = LAYER_NORM | {"positions": "rotary", "rope_theta": 10000.0}
RELEASE = (
    *("squared-relu", "apply-layernorm-1p", "disable-bias-linear", "position-embedding-type: rope"),
    *(
        "rotary-percent: 0.5",
        "group-query-attention",
        "num-query-groups: 2",
        "init-method-std: 0.01",
    ),
)
"""The form of the 15B model of its release tests."""
FORMS = [
    ((), "gpt2", {"ffn_size": 256, "dropout": 0.1}),
    (("position-embedding-type: rope",), "decoder", ROTARY | BIASES),
    (
        ("use-rotary-position-embeddings", "rotary-percent: 0.5"),
        "decoder",
        ROTARY | BIASES | {"rotary_share": 0.5},
    ),
    (("position-embedding-type: none",), "decoder", LAYER_NORM | BIASES | {"positions": "none"}),
    (("disable-bias-linear",), "decoder", LAYER_NORM | {"mlp": "gelu"}),
    (
        ("disable-bias-linear", "add-qkv-bias"),
        "decoder",
        LAYER_NORM | {"mlp": "gelu", "qkv_bias": True},
    ),
    (("disable-bias-linear", "openai-gelu"), "decoder", LAYER_NORM),
    (("no-bias-gelu-fusion",), "decoder", LAYER_NORM | BIASES | {"mlp": "gelu"}),
    (("swiglu",), "decoder", LAYER_NORM | BIASES | {"mlp": "swiglu", "ffn_size": 128}),
    (("normalization: RMSNorm",), "decoder", LAYER_NORM | BIASES | {"norm": "rms_norm"}),
    (
        ("group-query-attention", "num-query-groups: 2"),
        "decoder",
        LAYER_NORM | BIASES | {"num_kv_heads": 2},
    ),
    (("qk-layernorm",), "decoder", LAYER_NORM | BIASES | {"qk_norm": True}),
    (("kv-channels: 32",), "decoder", LAYER_NORM | BIASES | {"head_dim": 32}),
    (("window-size: 3,0",), "decoder", LAYER_NORM | BIASES | {"sliding_window": 4}),
    (("attention-dropout: 0.0",), "decoder", LAYER_NORM | BIASES | {"attention_dropout": 0.0}),
    (
        ("use-rotary-position-embeddings", "rotary-seq-len-interpolation-factor: 4"),
        "decoder",
        ROTARY | BIASES | {"rope_interpolation": 4.0},
    ),
    (
        RELEASE,
        "decoder",
        ROTARY | {"mlp": "squared_relu", "rotary_share": 0.5, "num_kv_heads": 2, "init_std": 0.01},
    ),
    (
        (
            "swiglu",
            "normalization: RMSNorm",
            "position-embedding-type: rope",
            "disable-bias-linear",
        ),
        "llama",
        {"num_kv_heads": 4, "ffn_size": 128, "dropout": 0.1, "rope_theta": 10000.0},
    ),
]


@pytest.mark.parametrize(("flags", "builder", "expected"), FORMS)
def test_the_form_of_a_functional_test(
    tmp_path: Path, flags: tuple[str, ...], builder: str, expected: dict[str, Any]
) -> None:
    found = read(tmp_path / "model_config.yaml", with_flags(*flags))
    assert form(found.config) == (builder, expected)
    assert not [item for item in found.dropped if item.reason is DropReason.NONE]


@pytest.mark.parametrize(
    "flag",
    [
        "bert-no-binary-head",
        "tokenizer-type: BertWordPieceCase",
        "model-provider: llava_vlm",
        "export-kd-teacher-load: /x",
        "position-embedding-type: yarn",
        "normalization: L1",
        "decoupled-lr: 0.002",
    ],
)
def test_other_models_and_recipes_are_refused_by_name(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(with_flags(flag))
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-030", "MW-INTEROP-089")) as caught:
        convert_file(path)
    assert f"--{flag.replace(':', '')}" in str(caught.value)


def test_a_corpus_of_sentences_is_of_bert(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(YAML.replace("corpus_text_document", "my-bert_00_text_sentence"))
    with pytest.raises(
        ConfigError, match="my-bert_00_text_sentence", check=has_code("MW-INTEROP-030")
    ):
        convert_file(path)


@pytest.mark.parametrize(
    ("activation", "gated", "fused", "mlp"),
    [
        ("megatron.core.activations.squared_relu", False, False, "squared_relu"),
        ("megatron.core.activations.fast_gelu", False, False, "gelu_tanh"),
        ("torch.nn.functional.gelu", False, False, "gelu"),
    ],
)
def test_activations_of_megatron_bridge(
    tmp_path: Path, activation: str, gated: bool, fused: bool, mlp: str
) -> None:
    text = dumps.BRIDGE.replace("torch.nn.functional.silu", activation)
    text = text.replace("gated_linear_unit: true", f"gated_linear_unit: {str(gated).lower()}")
    text = text.replace("model:\n", f"model:\n  bias_activation_fusion: {str(fused).lower()}\n")
    builder, options = form(read(tmp_path / "run_config.yaml", text).config)
    assert (builder, options["mlp"], options["norm"]) == ("decoder", mlp, "rms_norm")


@pytest.mark.parametrize(
    ("act", "mlp"),
    [
        ("gelu", "geglu"),
        ("gelu_pytorch_tanh", "geglu_tanh"),
        ("gelu_new", "geglu_tanh"),
        ("relu", "reglu"),
    ],
)
def test_gates_of_nanotron(tmp_path: Path, act: str, mlp: str) -> None:
    plain = read(tmp_path / "a.yaml", samples.NANOTRON).config.model
    found = read(
        tmp_path / "b.yaml", samples.NANOTRON.replace("hidden_act: silu", f"hidden_act: {act}")
    ).config.model
    assert plain.builder == "meshwright_models.llama:build"
    assert found.builder == "meshwright_models.decoder:build"
    assert found.options == plain.options | {"mlp": mlp}


def test_interpolated_positions_and_z_loss_of_nanotron(tmp_path: Path) -> None:
    lines = (
        "    hidden_act: silu\n    rope_seq_len_interpolation_factor: 4.0\n    z_loss_enabled: true"
    )
    text = samples.NANOTRON.replace("    hidden_act: silu", lines).replace(
        "is_llama_config", "is_qwen2_config"
    )
    found = read(tmp_path / "a.yaml", text)
    options = found.config.model.options
    assert (options["rope_interpolation"], options["z_loss"]) == (4.0, 1e-4)
    assert [item.note for item in found.dropped if item.item.key.endswith("z_loss_enabled")] != []
    set_to = text.replace(
        "z_loss_enabled: true", "z_loss_enabled: true\n    z_loss_coefficient: 0.002"
    )
    assert read(tmp_path / "b.yaml", set_to).config.model.options["z_loss"] == 0.002


YARN = """
  position_embedding_type: yarn
  yarn_rotary_scaling_factor: 8.0
  yarn_original_max_position_embeddings: 16
  yarn_beta_fast: 4.0
  yarn_beta_slow: 1.0
  yarn_mscale: 0.7
  yarn_mscale_all_dim: 0.0
  yarn_correction_range_round_to_int: false"""
YARN_BRIDGE = dumps.BRIDGE.replace("\n  position_embedding_type: rope", YARN).replace(
    "  scale_factor: 32.0\n", ""
)


@pytest.mark.parametrize("weights", [("0.7", "0.0"), ("null", "null"), ("1.0", "1.0")])
def test_yarn_of_megatron_bridge(tmp_path: Path, weights: tuple[str, str]) -> None:
    """Compare with the functions of megatron-core that its rotary embedding calls."""
    yarn = pytest.importorskip("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    text = YARN_BRIDGE.replace("yarn_mscale: 0.7", f"yarn_mscale: {weights[0]}").replace(
        "all_dim: 0.0", f"all_dim: {weights[1]}"
    )
    found = read(tmp_path / "run_config.yaml", text)
    options = found.config.model.options
    assert options["head_dim"] == 32 and "rope_scaling_factor" not in options
    given = [None if weight == "null" else float(weight) for weight in weights]
    scale = yarn._yarn_get_concentration_factor(8.0, *given)
    rotary = build_model(found.config.model.builder, options, 0).layers.block0.attention.rotary
    assert rotary.scale == pytest.approx(scale, rel=1e-15)
    low, high = yarn._yarn_find_correction_range(4.0, 1.0, 32, 500_000.0, 16, False)
    slowed = yarn._yarn_linear_ramp_mask(low, high, 16, torch.device("cpu")).double()
    plain = 500_000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    expected = plain * (1 - slowed) + plain / 8 * slowed
    torch.testing.assert_close(rotary.frequencies, expected, rtol=1e-6, atol=0)
    assert not [item for item in found.dropped if "yarn" in item.item.key]


@pytest.mark.parametrize(
    ("line", "instead", "place"),
    [
        (
            "yarn_rotary_scaling_factor: 8.0",
            "yarn_rotary_scaling_factor: null",
            'position_embedding_type = "yarn": ',
        ),
        (
            "yarn_rotary_scaling_factor: 8.0",
            "yarn_rotary_scaling_factor: 0.5",
            "yarn_rotary_scaling_factor = 0.5: ",
        ),
        ("rotary_percent: 1.0", "rotary_percent: 0.5", "rotary_percent = 0.5: "),
        ("yarn_beta_fast: 4.0", "yarn_beta_fast: .nan", "yarn_beta_fast = nan: "),
    ],
)
def test_yarn_that_has_no_meaning_is_refused(
    tmp_path: Path, line: str, instead: str, place: str
) -> None:
    path = tmp_path / "run_config.yaml"
    path.write_text(YARN_BRIDGE.replace(line, instead))
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-029", "MW-INTEROP-030")) as caught:
        convert_file(path)
    assert place in str(caught.value)


MTP = ("mtp-num-layers: 2", "mtp-loss-scaling-factor: 0.3", "position-embedding-type: rope")


def test_multi_token_prediction_of_megatron(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    found = read(path, with_flags(*MTP))
    options = found.config.model.options
    assert (options["mtp_layers"], options["mtp_loss_weight"]) == (2, 0.3)
    llama = ("swiglu", "normalization: RMSNorm", "disable-bias-linear")
    usual = read(path, with_flags("mtp-num-layers: 1", *llama, *MTP[2:])).config.model
    assert usual.builder == "meshwright_models.llama:build"
    assert (usual.options["mtp_layers"], usual.options["mtp_loss_weight"]) == (1, 0.1)
    for off in (
        ("mtp-num-layers: 0", "mtp-loss-scaling-factor: 0.3"),
        ("mtp-loss-scaling-factor: 0.3",),
    ):
        without = read(path, with_flags(*off, *MTP[2:]))
        assert not [name for name in without.config.model.options if name.startswith("mtp")]
        left = {item.reason for item in without.dropped if "mtp" in item.item.key}
        assert left <= {DropReason.NEEDLESS}


def test_multi_token_prediction_of_megatron_bridge(tmp_path: Path) -> None:
    text = dumps.BRIDGE.replace(
        "mtp_num_layers: null", "mtp_num_layers: 1\n  mtp_loss_scaling_factor: 0.25"
    )
    options = read(tmp_path / "run_config.yaml", text).config.model.options
    assert (options["mtp_layers"], options["mtp_loss_weight"]) == (1, 0.25)
    off = read(
        tmp_path / "run_config.yaml",
        dumps.BRIDGE.replace("mtp_num", "mtp_enabled: false\n  mtp_num"),
    )
    assert "mtp_layers" not in off.config.model.options
