"""Parameter counts and shapes against the published ones, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright_models import decoder, gpt2, llama, t5

LLAMA3 = [
    (4096, 32, 32, 14336, 8_030_261_248),
    (8192, 80, 64, 28672, 70_553_706_496),
    (16384, 126, 128, 53248, 405_853_388_800),
]
GPT2 = [
    (768, 12, 12, 124_439_808),
    (1024, 24, 16, 354_823_168),
    (1280, 36, 20, 774_030_080),
    (1600, 48, 25, 1_557_611_200),
]
BUILDERS = [lambda: gpt2.build(101, 32, 1, 4, 16), lambda: llama.build(101, 32, 1, 4, 2, 48, 16)]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("hidden_size", "num_layers", "num_heads", "published"), GPT2)
def test_gpt2_has_the_published_number_of_parameters(
    hidden_size: int, num_layers: int, num_heads: int, published: int
) -> None:
    with torch.device("meta"):
        model = gpt2.build(hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads)
    assert count(model) == published


def test_untied_gpt2_has_a_head_of_its_own() -> None:
    with torch.device("meta"):
        model = gpt2.build(tied=False)
    assert count(model) == 124_439_808 + 50257 * 768
    assert model.tied_weights == []


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "num_heads", "ffn_size", "published"), LLAMA3
)
def test_llama3_has_the_published_number_of_parameters(
    hidden_size: int, num_layers: int, num_heads: int, ffn_size: int, published: int
) -> None:
    with torch.device("meta"):
        model = llama.build(128256, hidden_size, num_layers, num_heads, 8, ffn_size)
    assert count(model) == published


def test_tied_weights_are_one_parameter_also_on_meta() -> None:
    with torch.device("meta"):
        models = [gpt2.build(num_layers=1), llama.build(1000, 64, 1, 4, 2, 96, tied=True)]
    for model in models:
        assert model.tied_weights == [("embedding.tokens.weight", "head.weight")]
        assert model.head.weight is model.embedding.tokens.weight


def test_shapes_of_a_llama_block() -> None:
    with torch.device("meta"):
        block = llama.build(128256, 4096, 1, 32, 8, 14336).block0
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert shapes == {
        "attention_norm.weight": (4096,),
        "attention.qkv.weight": (4096 + 2 * 8 * 128, 4096),
        "attention.out.weight": (4096, 4096),
        "mlp_norm.weight": (4096,),
        "mlp.gate_up.weight": (2 * 14336, 4096),
        "mlp.down.weight": (4096, 14336),
    }


def test_the_elements_are_named_and_numbered() -> None:
    with torch.device("meta"):
        model = gpt2.build(num_layers=3)
    assert [name for name, _ in model.named_children()] == [
        "embedding",
        "block0",
        "block1",
        "block2",
        "norm",
        "head",
    ]


@pytest.mark.parametrize("build", BUILDERS)
def test_a_model_on_meta_still_computes_shapes(build) -> None:
    with torch.device("meta"):
        model = build()
    assert model(torch.zeros(2, 7, dtype=torch.int64, device="meta")).shape == (2, 7, 101)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: gpt2.build(hidden_size=768, num_heads=10),
            ["hidden_size=768", "num_heads=10", "8 or 12"],
        ),
        (lambda: gpt2.build(num_layers=0, vocab_size=-1), ["num_layers=0", "vocab_size=-1"]),
        (lambda: llama.build(100, 64, 1, 8, 3, 96), ["num_heads=8", "num_kv_heads=3", "2 or 4"]),
        (lambda: llama.build(100, 36, 1, 4, 2, 96), ["head_dim", "36 / 4 = 9"]),
        (
            lambda: llama.build(100, 64, 1, 4, 2, 96, rope_low_freq_factor=4.0),
            ["rope_low_freq_factor=4.0"],
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_values(build, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("build", BUILDERS)
def test_a_sequence_longer_than_the_positions_is_refused(build) -> None:
    model = build()
    model(torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"17 tokens.*16 positions.*max_sequence_length"):
        model(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("builder", "option"),
    [
        *(
            (llama.build, f"rope_{name}")
            for name in ("theta", "scaling_factor", "low_freq_factor", "original_length")
        ),
        *((build, "norm_eps") for build in (llama.build, gpt2.build, t5.build, decoder.build)),
        *((decoder.build, name) for name in ("rope_theta", "rope_scaling_factor")),
    ],
)
def test_a_divisor_that_is_no_positive_number_is_named(
    builder: Any, option: str, value: float
) -> None:
    """Each trained to NaN: "lower the learning rate"."""
    sizes = {"vocab_size": 101, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "ffn_size": 48}
    sizes |= {"num_kv_heads": 4} if builder is llama.build else {}
    with pytest.raises(ValueError, match=f"must be positive and finite: {option}="):
        builder(**sizes, **{option: value})


def test_a_head_has_bounds() -> None:
    """Its frequencies are a list: 10^9 features would take all memory."""
    with pytest.raises(ValueError, match="at most 65,536"):
        llama.build(101, 32, 1, 4, 4, 48, head_dim=10**9)
