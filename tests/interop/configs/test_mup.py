"""Megatron-LM's muP in an imported file: the model and the optimizer against the formulas of megatron-core's source."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.model.build import configured_model
from meshwright.model.builder import find_builder
from meshwright_interop.configs import DropReason, ImportedConfig, convert_file
from tests.interop.configs import dumps, samples
from tests.support.errors import has_code

HIDDEN, HEAD_DIM, LAYERS = 64, 16, 4
LLAMA = samples.MEGATRON_LLAMA


def imported(path: Path, text: str, *overrides: str, without: set[str] | None = None) -> ImportedConfig:
    path.write_text(text)
    return convert_file(path, overrides=list(overrides), without=without or set())


def of_megatron(flags: dict[str, float], hidden: int = HIDDEN, head_dim: int = HEAD_DIM) -> dict[str, float]:
    """``TransformerConfig.__post_init__`` and ``get_mup_config_overrides``, for Adam."""
    m = hidden / flags.get("mup-base-hidden-size", hidden)
    output = flags.get("mup-output-mult", 1.0)
    base_head_scale = flags.get("mup-base-head-dim", 1.0) ** 0.5
    return {
        "std": 0.02 / math.sqrt(m),
        "residual std": 0.02 / (math.sqrt(2.0 * LAYERS) * math.sqrt(m)),
        "rate": 1.0 / m,
        "logits": 1.0 / m if output == 1.0 and m != 1.0 else output,
        "embeddings": flags.get("mup-embedding-mult", 1.0),
        "softmax_scale": base_head_scale / head_dim ** flags.get("mup-attn-scale-power", 1.0),
    }


def of_model(found: ImportedConfig, head_dim: int = HEAD_DIM) -> dict[str, float]:
    """The same numbers of the imported model."""
    config = found.config
    torch.manual_seed(0)
    model: nn.Sequential = find_builder(config.model.builder)(**config.model.options)
    groups = configured_model(config).groups
    block: Any = model.get_submodule("block1")
    rates = {(group.learning_rate_factor, group.eps_factor) for group in groups.values()} or {(1.0, 1.0)}
    ((rate, eps),) = rates
    assert rate == eps
    assert all(("attention" in name or "mlp" in name) and name.endswith(".weight") for name in groups)
    assert not any("norm" in name for name in groups)
    return {
        "std": float(block.attention.qkv.weight.detach().std()),
        "residual std": float(block.mlp.down.weight.detach().std()),
        "rate": rate,
        "logits": float(model.get_submodule("norm").multiplier),  # type: ignore[arg-type]
        "embeddings": float(model.get_submodule("embedding").multiplier),  # type: ignore[arg-type]
        "softmax_scale": 1 / (block.attention.core.score_divisor or math.sqrt(head_dim)),
    }


FLAGS: list[dict[str, float]] = [
    {},
    {"mup-base-hidden-size": 16},
    {"mup-base-hidden-size": 16, "mup-base-head-dim": 16},
    {"mup-base-hidden-size": 256, "mup-attn-scale-power": 0.5},
    {"mup-base-hidden-size": 24, "mup-base-head-dim": 8, "mup-output-mult": 0.3, "mup-embedding-mult": 10.0},
    {"mup-output-mult": 2.0},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_model_has_megatrons_numbers(flags: dict[str, float], tmp_path: Path) -> None:
    words = " ".join(f"--{name} {value:g}" for name, value in flags.items())
    found = imported(tmp_path / "a.txt", LLAMA.replace("--swiglu", f"--swiglu --use-mup {words}"))
    expected, ours = of_megatron(flags), of_model(found)
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, rel=0.05 if "std" in name else 1e-7), name
    model: nn.Sequential = find_builder(found.config.model.builder)(**found.config.model.options)
    assert float(model.get_parameter("head.weight").detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.get_parameter("embedding.tokens.weight").detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not [key.item.key for key in found.dropped if "mup" in key.item.key]


def test_a_dump_has_the_derived_numbers_too(tmp_path: Path) -> None:
    """``run_config.yaml`` is written after ``__post_init__``, which sets mup_output_mult and softmax_scale."""
    written = of_megatron({"mup-base-hidden-size": 16, "mup-base-head-dim": 8}, head_dim=32)
    fields = f"""use_mup: true
  mup_width_mult: 4.0
  mup_base_hidden_size: 16
  mup_base_head_dim: 8
  mup_attn_scale_power: 1.0
  mup_embedding_mult: 1.0
  mup_output_mult: {written["logits"]}
  softmax_scale: {written["softmax_scale"]}
  embedding_init_method_std: 0.01
  qk_layernorm"""
    found = imported(tmp_path / "run_config.yaml", dumps.BRIDGE.replace("qk_layernorm", fields))
    ours = of_model(found, head_dim=32)
    assert {name: ours[name] for name in ("rate", "logits", "embeddings", "softmax_scale")} == pytest.approx(
        {name: written[name] for name in ("rate", "logits", "embeddings", "softmax_scale")}, rel=1e-7
    )
    options = found.config.model.options
    assert options["mup_base_head_dim"] == pytest.approx(8) and "mup_output_multiplier" not in options


def test_a_rate_of_its_own_for_the_embeddings_multiplies(tmp_path: Path) -> None:
    flags = "--use-mup --mup-base-hidden-size 16 --decoupled-lr 3e-4 --decoupled-min-lr 2e-5"
    found = imported(tmp_path / "a.txt", LLAMA.replace("--swiglu", f"--swiglu {flags}"))
    groups = configured_model(found.config).groups
    factors = {name: group.learning_rate_factor for name, group in groups.items()}
    assert factors["embedding.tokens.weight"] == factors["head.weight"] == pytest.approx(2)
    assert factors["block0.mlp.down.weight"] == 0.25 and "norm.weight" not in factors


def test_without_the_flag_its_numbers_have_no_effect(tmp_path: Path) -> None:
    found = imported(tmp_path / "a.txt", LLAMA.replace("--swiglu", "--swiglu --mup-base-hidden-size 16"))
    assert not [name for name in found.config.model.options if name.startswith("mup")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mup-base-head-dim 0", "a number from 1e-09 up"),
        ("--mup-base-hidden-size 0", "a whole number from 1"),
        ("--mup-output-mult nan", "a number here"),
    ],
)
def test_numbers_without_a_meaning(flags: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said, check=has_code("MW-INTEROP-029")):
        imported(tmp_path / "a.txt", LLAMA.replace("--swiglu", f"--swiglu --use-mup {flags}"))


def test_a_model_of_ones_own_has_its_own_factors(tmp_path: Path) -> None:
    text = LLAMA.replace("--swiglu", "--swiglu --use-mup --mup-base-hidden-size 16")
    with pytest.raises(
        ConfigError, match="declares its learning-rate factors itself", check=has_code("MW-INTEROP-089")
    ):
        imported(tmp_path / "a.txt", text, "--model.builder=mine:build")
    found = imported(tmp_path / "a.txt", text, "--model.builder=mine:build", without={"use-mup"})
    assert [key.item.key for key in found.dropped if "mup" in key.item.key] == ["--use-mup"]
    assert {key.reason for key in found.dropped if "mup" in key.item.key} == {DropReason.NONE}
