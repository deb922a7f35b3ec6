"""Options of attention that our Llama has: norms of q and k, head size,
biases and a window keep their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import resolve
from meshwright.errors import ConfigError
from meshwright_interop.configs import convert_file
from meshwright_models.attention import AttentionCore
from tests.interop.configs import samples
from tests.support.errors import has_code

HEADS = "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16"
GPT = f"{samples.MEGATRON_FLAGS.strip()} "


def options(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    config = convert_file(path).config
    assert draw_blueprint(resolve(config)).stages  # the model can be built
    return config.model.options


def llama(flags: str, heads: str = HEADS) -> str:
    text = samples.MEGATRON_LLAMA.replace(HEADS, f"{heads} {flags}")
    assert flags in text
    return text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--qk-layernorm", {"qk_norm": True}),
        ("--add-qkv-bias", {"qkv_bias": True}),
        ("--window-size 3,0", {"sliding_window": 4}),
        ("--window-size '(3, 0)'", {"sliding_window": 4}),
        ("--window-size 3 0", {"sliding_window": 4}),
        ("--window-size -1,0", {}),
        ("--norm-epsilon 1e-6 --qk-layernorm", {"qk_norm": True, "norm_eps": 1e-6}),
    ],
)
def test_flags_of_megatron_become_options_of_llama(
    tmp_path: Path, flags: str, expected: dict[str, Any]
) -> None:
    known = {
        name: value
        for name, value in options(tmp_path / "a.txt", llama("")).items()
        if name != "norm_eps"
    }
    found = options(tmp_path / "b.txt", llama(flags))
    assert found == known | {"norm_eps": 1e-5} | expected


def test_heads_may_be_of_another_size(tmp_path: Path) -> None:
    heads = HEADS.replace("--kv-channels 16", "--kv-channels 32")
    assert options(tmp_path / "a.txt", llama("--qk-layernorm", heads))["head_dim"] == 32


def test_the_window_has_the_tokens_of_megatrons_mask(tmp_path: Path) -> None:
    """``get_sliding_window_causal_mask`` there:
    ``triu(-before)`` and ``tril(after)`` of a square of ones.
    """
    window = options(tmp_path / "a.txt", llama("--window-size 3,0"))["sliding_window"]
    theirs = torch.ones(8, 8, dtype=torch.bool).triu(-3).tril(0)
    assert torch.equal(AttentionCore(window).seen(range(8), range(8), torch.device("cpu")), theirs)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--window-size 3,3",
            "--window-size 3,3: meshwright has no model with a sliding window other than",
        ),
        (
            "--window-size 4",
            "--window-size 4: meshwright has no model with a sliding window other than",
        ),
        ("--window-size 3,0 --window-attn-skip-freq 2", "a sliding window in some layers only"),
        ("--qk-l2-norm", "an L2 norm of q and k"),
    ],
)
def test_other_windows_and_norms_are_refused(tmp_path: Path, flags: str, said: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(llama(flags))
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-030")) as caught:
        convert_file(path)
    assert said in str(caught.value)


def test_gpt_2_has_the_biases_of_q_k_and_v_anyway(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"--add-qkv-bias {GPT}")
    assert "qkv_bias" not in convert_file(path).config.model.options


QWEN = samples.NANOTRON.replace("is_llama_config: true", "is_qwen2_config: true")


def nanotron(*lines: str, text: str = QWEN) -> str:
    return text.replace(
        "    hidden_act: silu",
        "\n".join(["    hidden_act: silu", *(f"    {line}" for line in lines)]),
    )


def test_nanotrons_qwen_has_biases_and_a_window(tmp_path: Path) -> None:
    """Its kernel gets ``(sliding_window_size - 1, 0)``, so the size counts the token itself,
    as here.
    """
    found = options(
        tmp_path / "a.yaml", nanotron("attention_bias: true", "sliding_window_size: 20")
    )
    assert (found["qkv_bias"], found["sliding_window"]) == (True, 20)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            nanotron("attention_bias: true", text=samples.NANOTRON),
            "biases in nanotron's Llama, which has none",
        ),
        (
            nanotron("sliding_window_size: 20", "_attn_implementation: flex_attention"),
            "outside of flash_attention_2",
        ),
        (
            nanotron("sliding_window_size: 20", "_use_qkv_packed: false"),
            "outside of flash_attention_2",
        ),
    ],
)
def test_where_nanotrons_numbers_are_others_it_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-030")) as caught:
        convert_file(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(("flavor", "tied"), [("0.6B", True), ("8B", False)])
def test_the_qwen3_of_torchtitan(tmp_path: Path, flavor: str, tied: bool) -> None:
    """Heads of 128 whatever the width, norms of q and k; the small ones are tied."""
    path = tmp_path / "a.toml"
    path.write_text(f'[model]\nname = "qwen3"\nflavor = "{flavor}"\n')
    found = convert_file(path).config.model.options
    assert (found["head_dim"], found["qk_norm"], found["norm_eps"], found["tied"]) == (
        128,
        True,
        1e-6,
        tied,
    )
    path.write_text('[model]\nname = "qwen3"\nflavor = "30B-A3B"\n')
    with pytest.raises(
        ConfigError,
        match="30B-A3B",
        check=has_code("MW-INTEROP-030"),
    ):
        convert_file(path)
