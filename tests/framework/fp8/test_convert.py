"""The linears that compute in float8, by the default and by patterns; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.fp8.convert import names_in_fp8
from meshwright.fp8.linear import Fp8Linear
from meshwright.model.build import build_model, configured_model
from meshwright.verify import layout_config, parse_layout
from tests.framework.verify.cases import config_of
from tests.support.errors import raises

DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"


def config(num_layers: int = 4, hidden_size: int = 32, **train: Any) -> RunConfig:
    sizes = {
        "vocab_size": 61,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    options = {**sizes, "ffn_size": 48, "max_sequence_length": 8}
    base = config_of("meshwright_models.llama:build", options, 8)
    return base.replace(train={"linear": "fp8", "dtype": "bfloat16", **train})


def in_fp8(given: RunConfig) -> list[str]:
    layers = configured_model(given).layers
    return [name for name, module in layers.named_modules() if isinstance(module, Fp8Linear)]


def test_by_default_the_first_and_last_block_and_the_head_stay() -> None:
    parts = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    assert in_fp8(config()) == [f"block{index}.{part}" for index in (1, 2) for part in parts]


def test_patterns_take_the_place_of_the_default() -> None:
    found = in_fp8(config(fp8_keep=["head", "block0", "*.attention", "block3.mlp.*"]))
    assert found == [f"block{index}.mlp.{part}" for index in (1, 2) for part in ("gate_up", "down")]
    assert "head" in in_fp8(config(fp8_keep=[]))


def test_a_linear_at_two_places_is_converted_at_both_or_at_none() -> None:
    shared = nn.Linear(4, 4)
    layers = nn.Sequential(
        nn.Embedding(9, 4), nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 9)
    )
    assert names_in_fp8(layers, {}, None) == ["3"]  # 2 is 4, the last block
    assert names_in_fp8(layers, {}, ["4"]) == ["1", "3", "5"]


def test_what_a_rule_of_the_users_splits_stays() -> None:
    model = build_model("meshwright_models.llama:build", config().model.options, 1)
    found = names_in_fp8(model.layers, {"block2.mlp": lambda *args: None}, None)
    assert [name for name in found if name.startswith("block2")] == [
        "block2.attention.qkv",
        "block2.attention.out",
    ]


@pytest.mark.parametrize(
    ("train", "code", "value"),
    [
        ({"fp8_keep": ["haed"]}, "MW-PLACEMENT-001", "head"),
        ({"fp8_keep": ["*"]}, "MW-MODEL-038", '["head"]'),
    ],
)
def test_patterns_without_a_meaning(train: dict[str, Any], code: str, value: str) -> None:
    with raises(code, value):
        configured_model(config(**train))


def test_a_model_without_middle_blocks_has_nothing_to_convert() -> None:
    with raises("MW-MODEL-038"):
        configured_model(config(num_layers=2))


def test_sizes_that_the_kernels_on_a_gpu_do_not_take() -> None:
    given = layout_config(config(), parse_layout("tp2"), 4, "bfloat16", "cuda")
    with raises("MW-MODEL-039", "block1.mlp.down 32 x 24"):  # 48 / 2
        draw_blueprint(given)
    draw_blueprint(layout_config(config(), parse_layout("tp2"), 4, "bfloat16", "cpu"))
    draw_blueprint(layout_config(config(), parse_layout("dp1"), 4, "bfloat16", "cuda"))
