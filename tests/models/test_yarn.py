"""YaRN's frequencies and scales against transformers', and logits with gradients of the models
that use it.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright_models import decoder, llama
from meshwright_models.mla import LatentAttention
from meshwright_models.yarn import YarnOptions
from tests.models.test_experts_of_transformers import InFloat64
from tests.support.errors import has_code

DEEPSEEK_V3 = {"factor": 40.0, "original_length": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
RELEASED: dict[str, tuple[int, float, int, dict[str, Any]]] = {
    "Qwen3-8B": (128, 1e6, 40960, {"factor": 4.0, "original_length": 32768}),
    "DeepSeek-V3": (64, 1e4, 163840, DEEPSEEK_V3),
    "DeepSeek-V2": (64, 1e4, 163840, DEEPSEEK_V3 | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    "Kimi-K2": (
        64,
        5e4,
        131072,
        DEEPSEEK_V3 | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    ),
    "gpt-oss": (64, 15e4, 131072, {"factor": 32.0, "original_length": 4096, "truncate": False}),
    "a factor given": (8, 1e4, 64, {"factor": 4.0, "original_length": 16, "attention_factor": 0.8}),
    "two weights": (
        16,
        1e4,
        64,
        {"factor": 4.0, "original_length": 100, "mscale": 0.7, "mscale_all_dim": 0.3},
    ),
    "one weight": (16, 1e4, 64, {"factor": 4.0, "original_length": 100, "mscale_all_dim": 0.3}),
    "one pair of a ramp": (
        16,
        1e4,
        64,
        {"factor": 4.0, "original_length": 100, "beta_fast": 3, "beta_slow": 3, "truncate": False},
    ),
    "no scaling": (16, 1e4, 64, {"factor": 1.0, "original_length": 64}),
    "all pairs fast": (8, 10.0, 2**21, {"factor": 2.0, "original_length": 2**20}),
    "all pairs slow": (8, 1e4, 8, {"factor": 2.0, "original_length": 4}),
}
"""Name -> rotated features, theta, longest sequence, options: six as they are released."""


def in_transformers(options: dict[str, Any], theta: float) -> dict[str, Any]:
    """Return the rotary table of a config.json."""
    table = {
        "original_max_position_embeddings" if name == "original_length" else name: value
        for name, value in options.items()
    }
    return {"rope_type": "yarn", "rope_theta": theta, **table}


@pytest.mark.parametrize("name", RELEASED)
def test_frequencies_and_scale_are_those_of_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    features, theta, length, options = RELEASED[name]
    config = SimpleNamespace(
        head_dim=features,
        hidden_size=features,
        num_attention_heads=1,
        max_position_embeddings=length,
        rope_parameters=in_transformers(options, theta),
        standardize_rope_params=lambda: None,
    )
    with InFloat64():
        expected, scale = utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    yarn = YarnOptions(**options)
    found = torch.tensor(yarn.frequencies(features, theta), dtype=torch.float64)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert yarn.rotation_scale == pytest.approx(scale, rel=1e-15)
    plain = [theta ** (-2 * i / features) for i in range(features // 2)]
    assert (found.tolist() != plain) is (name != "no scaling")


def test_a_latent_attention_scales_its_scores() -> None:
    """Check those of Kimi-K2: the square of 1 + 0.1 log 32, on all features."""
    options = {"vocab_size": 31, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
    options |= {"num_kv_heads": 4, "ffn_size": 48}
    mla = {"kv_rank": 10, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
    kimi = RELEASED["Kimi-K2"][3]
    attentions = [
        module
        for yarn in (kimi, kimi | {"mscale_all_dim": 0.0}, None)
        for module in llama.build(**options, mla=mla, rope_yarn=yarn).modules()
        if isinstance(module, LatentAttention)
    ]
    divisors = [attention.core.score_divisor for attention in attentions]
    assert divisors == [pytest.approx(math.sqrt(12) / (1 + 0.1 * math.log(32)) ** 2), None, None]
    scales = [attention.rotary.scale for attention in attentions]
    assert scales == [1.0, pytest.approx(1 + 0.1 * math.log(32)), 1.0]


def test_the_decoder_scales_the_rotated_features() -> None:
    """Check ``rotary_share`` of a head: the ramp is over these pairs alone."""
    yarn = {"factor": 4.0, "original_length": 64}
    sizes = {"vocab_size": 31, "hidden_size": 64, "num_layers": 1, "num_heads": 2, "ffn_size": 48}
    for share in (1.0, 0.5):
        rotary = decoder.build(**sizes, rope_yarn=yarn, rotary_share=share).block0.attention.rotary
        expected = YarnOptions(**yarn).frequencies(int(32 * share), 10_000.0)
        assert list(rotary.values) == expected and rotary.scale == 1 + 0.1 * math.log(4)
    cos, sin = rotary(torch.zeros(1, 9, 32, dtype=torch.float64))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, rotary.scale**2))


GIVEN = {"factor": 4.0, "original_length": 64}


@pytest.mark.parametrize(
    ("yarn", "others", "said"),
    [
        (GIVEN | {"factor": 0.5}, {}, "factor=0.5 must be at least 1"),
        (GIVEN | {"beta_fast": 1, "beta_slow": 2}, {}, "beta_fast=1 must not be below beta_slow=2"),
        (GIVEN | {"beta_slow": 0}, {}, "beta_slow=0 must be positive"),
        (GIVEN | {"attention_factor": 0.0}, {}, "attention_factor=0.0 must be positive"),
        (GIVEN | {"mscale": -1.0}, {}, "mscale=-1.0 must not be negative"),
        (GIVEN | {"factor": math.nan}, {}, "factor=nan must be a finite number"),
        (GIVEN | {"factor": "4"}, {}, "factor='4' must be a finite number"),
        (GIVEN | {"original_length": 64.5}, {}, "original_length=64.5 must be a whole number"),
        (GIVEN | {"original_length": 0}, {}, "original_length=0 must be positive"),
        (GIVEN | {"truncate": 1}, {}, "truncate=1 must be true or false"),
        (GIVEN | {"betafast": 1}, {}, "there is no option betafast; did you mean beta_fast?"),
        ({"factor": 4.0}, {}, "rope_yarn: original_length must be given"),
        ("yes", {}, "rope_yarn='yes' must be a table"),
        (GIVEN, {"rope_scaling_factor": 8.0}, "rope_yarn with rope_scaling_factor=8.0"),
        (GIVEN, {"rope_theta": 1.0}, "rope_yarn with rope_theta=1.0"),
    ],
)
def test_wrong_options_are_named(yarn: Any, others: dict[str, Any], said: str) -> None:
    sizes = {"vocab_size": 31, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "ffn_size": 48}
    for name, more in (("decoder", {}), ("llama", {"num_kv_heads": 4})):
        given = sizes | more | others | {"rope_yarn": yarn}
        with pytest.raises(ModelError, check=has_code("MW-MODEL-003")) as caught:
            build_model(f"meshwright_models.{name}:build", given, 0)
        assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "others", [{"positions": "learned"}, {"positions": "none"}, {"rope_interpolation": 2.0}]
)
def test_a_decoder_has_one_scaling_of_rotary_positions(others: dict[str, Any]) -> None:
    sizes = {"vocab_size": 31, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "ffn_size": 48}
    with pytest.raises(ModelError, match="rope_yarn with ", check=has_code("MW-MODEL-003")):
        build_model("meshwright_models.decoder:build", sizes | others | {"rope_yarn": GIVEN}, 0)
    off = sizes | others | {"rope_yarn": "none"}
    build_model("meshwright_models.decoder:build", off, 0)


@pytest.mark.parametrize(("length", "beta"), [(10**400, 1e-308), (1, 1e308)], ids=["huge", "tiny"])
def test_numbers_at_the_ends_of_their_range_do_not_overflow(length: int, beta: float) -> None:
    yarn = YarnOptions(1e300, length, beta_fast=beta, beta_slow=beta)
    assert all(map(math.isfinite, yarn.frequencies(8, 1 + 1e-12)))
    assert math.isfinite(yarn.rotation_scale)
