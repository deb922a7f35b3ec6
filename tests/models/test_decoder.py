"""The decoder of options against GPT-2 and Llama, bit by bit,
and against transformers' architectures in float64.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright_models import decoder, gpt2, llama
from tests.support.errors import has_code

IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79], [32, 38, 46, 26, 43, 38, 1, 2]])
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": 16,
}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
GPT2 = BIASES | {
    "norm": "layer_norm",
    "positions": "learned",
    "mlp": "gelu_tanh",
    "ffn_size": 128,
    "tied": True,
}
LLAMA = {"num_kv_heads": 2, "ffn_size": 44, "rope_theta": 500_000.0}
QWEN3 = LLAMA | {
    "qk_norm": True,
    "head_dim": 10,
    "qkv_bias": True,
    "sliding_window": 3,
    "rope_scaling_factor": 8.0,
}
SAME = {
    "gpt2": (gpt2.build, {"dropout": 0.2}, GPT2 | {"dropout": 0.2}),
    "llama": (llama.build, LLAMA, LLAMA),
    "llama, all options": (llama.build, QWEN3 | {"dropout": 0.1}, QWEN3 | {"dropout": 0.1}),
}


def loss_of(model: nn.Module, ids: Tensor = IDS) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Logits, loss and gradients of one step, with the dropout masks of one seed."""
    torch.manual_seed(3)
    model.zero_grad()
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    return logits.detach(), loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("case", SAME)
def test_with_their_options_it_is_gpt2_and_llama_in_every_bit(case: str) -> None:
    build, theirs, ours = SAME[case]
    models = []
    for builder, options in ((build, theirs), (decoder.build, ours)):
        torch.manual_seed(1)
        models.append(builder(**SIZES | options))
    for (name, value), (other, expected) in zip(
        *(m.named_parameters() for m in reversed(models)), strict=True
    ):
        assert name == other and torch.equal(value, expected), name
    for attribute in (
        "sharding_plan",
        "divisible",
        "tied_weights",
        "selective_recompute",
        "z_loss",
    ):
        assert getattr(models[0], attribute) == getattr(models[1], attribute)
    first, second = (loss_of(model) for model in models)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


class ExactRotary(nn.Module):
    """Cos and sin in float64, in the form of transformers' rotary modules,
    which compute in float32.
    """

    def __init__(self, size: int, base: float) -> None:
        super().__init__()
        self.frequencies = torch.tensor(
            [base ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64
        )

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, :, None].double() * self.frequencies.repeat(2)
        return angles.cos(), angles.sin()


COMMON = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"intermediate_size": 44, "max_position_embeddings": 16, "tie_word_embeddings": False}
THEIRS = {
    "GPTNeoX": (
        COMMON | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        4,
        1e4,
    ),
    "StableLm": (
        COMMON
        | {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        }
        | {"use_qkv_bias": True},
        2,
        1e4,
    ),
    "Nemotron": (
        COMMON
        | {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        4,
        1e4,
    ),
    "Starcoder2": (
        COMMON
        | {"num_key_value_heads": 2, "sliding_window": 3, "rope_parameters": {"rope_theta": 1e5}},
        8,
        1e5,
    ),
}
"""Architecture -> its configuration, rotated features of a head, base of the frequencies."""
NORM = {"norm": "layer_norm", "ffn_size": 44}
OURS = {
    "GPTNeoX": BIASES | NORM | {"mlp": "gelu", "rotary_share": 0.5, "parallel_residual": True},
    "StableLm": NORM | {"num_kv_heads": 2, "rotary_share": 0.25, "qkv_bias": True},
    "Nemotron": NORM | {"num_kv_heads": 2, "rotary_share": 0.5, "mlp": "squared_relu"},
    "Starcoder2": BIASES
    | NORM
    | {
        "num_kv_heads": 2,
        "mlp": "gelu_tanh",
        "sliding_window": 3,
        "rope_theta": 1e5,
        "norm_eps": 1e-5,
    },
}
NAMES = {
    "gpt_neox.embed_in": "embedding.tokens",
    "gpt_neox.final_layer_norm": "norm",
    "embed_out": "head",
    "lm_head": "head",
    "model.embed_tokens": "embedding.tokens",
    "model.norm": "norm",
}
INNER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "attention.query_key_value": "attention.qkv",
    "attention.dense": "attention.out",
    "self_attn.o_proj": "attention.out",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def our_values(theirs: dict[str, Tensor], name: str, ours: nn.Sequential) -> dict[str, Tensor]:
    """Return values of transformers' parameters, or their gradients, under our names: q, k, v by
    group, gate with up.
    """
    found: dict[str, Tensor] = {}
    for full, value in theirs.items():
        owner, _, kind = full.rpartition(".")
        layer = re.match(r"(?:model|gpt_neox)\.layers\.(\d+)\.(.+)", owner)
        if layer is None:
            found[f"{NAMES[owner]}.{kind}"] = value
            continue
        block, inner = f"block{layer[1]}", layer[2]
        if inner in ("self_attn.q_proj", "mlp.gate_proj"):
            others = [inner.replace("q_proj", "k_proj"), inner.replace("q_proj", "v_proj")]
            if inner == "mlp.gate_proj":
                up = theirs[full.replace("gate_proj", "up_proj")]
                size = ours.get_submodule(f"{block}.mlp").block_size
                pairs = [
                    part
                    for pair in zip(value.split(size), up.split(size), strict=True)
                    for part in pair
                ]
                found[f"{block}.mlp.gate_up.{kind}"] = torch.cat(pairs)
            else:
                k, v = (theirs[full.replace(inner, other)].chunk(2) for other in others)
                parts = [part for group in zip(value.chunk(2), k, v, strict=True) for part in group]
                found[f"{block}.attention.qkv.{kind}"] = torch.cat(parts)
        elif inner not in ("self_attn.k_proj", "self_attn.v_proj") and (name, inner) != (
            "StableLm",
            "mlp.up_proj",
        ):
            found[f"{block}.{INNER[inner]}.{kind}"] = value
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    settings, rotated, base = THEIRS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**settings)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    rotary = next(
        n
        for n, module in theirs.named_modules()
        if type(module).__name__.endswith("RotaryEmbedding")
    )
    theirs.set_submodule(rotary, ExactRotary(rotated, base))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    ours = decoder.build(**SIZES | OURS[name]).double()
    values = our_values({n: p.detach() for n, p in theirs.named_parameters()}, name, ours)
    # its norms store 1 less
    one = {n: n.endswith("norm.weight") and name == "Nemotron" for n in values}
    ours.load_state_dict({n: value + 1.0 if one[n] else value for n, value in values.items()})
    found, expected = ours(IDS), theirs(IDS, use_cache=False).logits
    assert (found - expected).norm() / expected.norm() < 1e-12
    for logits in (found, expected):
        F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
    gradients = our_values({n: p.grad for n, p in theirs.named_parameters()}, name, ours)
    for parameter_name, parameter in ours.named_parameters():
        wanted = gradients[parameter_name]
        assert (parameter.grad - wanted).norm() / wanted.norm() < 1e-10, parameter_name


def test_positions_none_and_interpolated() -> None:
    """Without positions and order a token's logits do not depend on the order
    of the tokens before it.
    """
    torch.manual_seed(0)
    swapped = IDS[:, [1, 0, *range(2, 8)]]
    for positions, same in (("none", True), ("rotary", False), ("learned", False)):
        model = decoder.build(
            **SIZES | {"ffn_size": 44, "num_layers": 1, "positions": positions}
        ).double()
        assert (
            torch.allclose(model(IDS)[:, 2:], model(swapped)[:, 2:], rtol=1e-12, atol=1e-12) is same
        )
    options = decoder.DecoderOptions(**SIZES, ffn_size=8, rope_interpolation=4.0)
    assert list(options.rotary(8)().values) == [10_000.0 ** (-2 * i / 8) / 4 for i in range(4)]


def test_dropout_of_attention_is_its_own() -> None:
    model = decoder.build(**SIZES | {"ffn_size": 44, "dropout": 0.3, "attention_dropout": 0.0})
    shares = {
        name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)
    }
    assert {name for name, p in shares.items() if p == 0} == {
        f"block{i}.attention.dropout" for i in range(2)
    }
    assert not model.block0.attention.drops, "the fused kernel runs"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm": "batch_norm"}, "norm='batch_norm' must be one of layer_norm, rms_norm"),
        ({"mlp": "swish"}, "mlp='swish' must be one of gelu, gelu_tanh"),
        ({"positions": "alibi"}, "positions='alibi' must be one of learned, rotary, none"),
        ({"rotary_share": 0.2}, "got 1: rotary_share=0.2 of head_dim=8"),
        ({"rotary_share": 1.5}, "rotary_share=1.5 must be above 0 and at most 1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        (
            {"activation": "gelu"},
            "model.options.activation: meshwright_models.decoder:build does not take it",
        ),
        ({"ffn_size": None}, "ffn_size"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    given = {
        key: value
        for key, value in (SIZES | {"ffn_size": 44} | options).items()
        if value is not None
    }
    with pytest.raises(ModelError, check=has_code("MW-MODEL-001", "MW-MODEL-003")) as caught:
        build_model("meshwright_models.decoder:build", given, 0)
    assert said in str(caught.value)


def test_the_documentation_has_every_option_with_its_default() -> None:
    text = Path(__file__).parents[2].joinpath("docs/models.md").read_text()
    section = text.partition("### Options of the decoder")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE)
    expected = []
    for name, parameter in inspect.signature(decoder.build).parameters.items():
        value = parameter.default
        shown = (
            "not set" if value is None else str(value).lower() if isinstance(value, bool) else value
        )
        text = (
            "required"
            if value is parameter.empty
            else f'`"{value}"`'
            if isinstance(value, str)
            else f"`{shown}`"
        )
        expected.append((name, text))
    assert rows == expected
    for choices in decoder.CHOICES.values():
        assert all(f'`"{choice}"`' in section for choice in choices)
