"""Options of our models in any layout: the numbers of one process, in which plain torch trains
the builder's module.

Every setting is proven on the layouts that cut what it changes, every layout with several settings.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.verify import Layout, parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    LATER,
    VOCAB_SIZE,
    References,
    assert_agrees,
    config_of,
    model_config,
    size_for,
)
from tests.support.marks import long_row

DECODERS: dict[str, dict[str, Any]] = {
    "neox": {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    | {"norm": "layer_norm", "mlp": "gelu", "rotary_share": 0.5, "parallel_residual": True}
    | {"dropout": 0.1, "attention_dropout": 0.2},
    "nemotron": {"norm": "layer_norm", "mlp": "squared_relu", "rotary_share": 0.5}
    | {"qk_norm": True, "tied": True},
    "geglu": {"mlp": "geglu", "positions": "none", "mlp_bias": True}
    | {"sliding_window": 3, "z_loss": 0.01},
    "learned": {"positions": "learned", "mlp": "relu", "out_bias": True}
    | {"label_smoothing": 0.1, "dropout": 0.1},
    "yarn": {"rope_yarn": {"factor": 4.0, "original_length": 4, "beta_fast": 2.0}},
}
"""Options of ``decoder``. All but the first and fourth have two query heads to each key-value head."""

MLA = {"q_rank": 6, "kv_rank": 10, "nope_dim": 4, "rope_dim": 2, "v_dim": 5}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"moe": {"num_experts": 4, "top_k": 2}},
    "deepseek": {
        "moe": {"num_experts": 8, "top_k": 3, "expert_ffn_size": 12, "shared_ffn_size": 24}
        | {"first_dense": 1, "router": "sigmoid", "scaling": 2.5, "balance": "bias"}
        | {"num_groups": 4, "groups_per_token": 2},
        "mla": MLA,
        "mtp_layers": 1,
        "dropout": 0.1,
    },
    "kimi": {
        "mla": MLA | {"rope_dim": 4},
        "moe": {"num_experts": 4, "top_k": 2, "router": "sigmoid", "balance": "bias"},
        "rope_yarn": {"factor": 8.0, "original_length": 4, "beta_fast": 1.0}
        | {"mscale": 0.5, "mscale_all_dim": 1.0},
    },
    "qwen2": {
        "moe": {"num_experts": 6, "top_k": 6, "shared_ffn_size": 16, "shared_gate": True}
        | {"normalise": False}
    },
    "olmoe": {"moe": {"num_experts": 16, "top_k": 1, "normalise": False}, "qk_norm": "whole"},
}
"""Options of ``llama``, with all experts on every rank. The fourth sends each token to all experts,
the last leaves some experts without a token.
"""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 by layers": ("gpt2", {"init_std": 0.1, "residual_init": "layer_index"}),
    "llama alike": ("llama", {"init_std": 0.05, "residual_init": "none"}),
    # a vocabulary of 61, padded where tp splits it; validation has neither option of the loss
    "gpt2 smoothed": ("gpt2", {"label_smoothing": 0.1}),
    "llama z": ("llama", {"z_loss": 0.01}),
    "t5 both": ("t5", {"label_smoothing": 0.2, "z_loss": 1e-3}),
}
"""Initial weights, and losses."""


def model(name: str, layout: Layout) -> RunConfig:
    """Return the smallest model with these options that the layout fits."""
    size = size_for(layout)
    if name in OTHERS:
        builder, options = OTHERS[name]
        return model_config(builder, size, **options)
    is_grouped = name not in ("neox", "learned", "deepseek", "kimi")
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "num_layers": size.num_blocks,
        "max_sequence_length": size.sequence_length,
        "hidden_size": 4 * size.heads,
        "ffn_size": 6 * size.heads,
        "num_heads": 2 * size.heads if is_grouped else size.heads,
        "num_kv_heads": size.heads,
    }
    if name not in ("deepseek", "kimi"):
        sizes["head_dim"] = 4
    if name in DECODERS:
        return config_of(
            "meshwright_models.decoder:build", sizes | DECODERS[name], size.sequence_length
        )
    options = sizes | MIXTURES[name]
    if layout.cp > 1:
        options["mtp_layers"] = 0  # refused beside cp
    return config_of("meshwright_models.llama:build", options, size.sequence_length)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        long_row("neox", "dp2,pp2,tp2,sequence"),
        LATER("neox", "dp2,tp2,zero3"),
        LATER("neox", "pp4,interleaved_1f1b"),
        long_row("nemotron", "dp2,pp2,tp2,sequence"),
        LATER("nemotron", "dp4,zero2,mbs2"),
        long_row("geglu", "dp2,tp2,zero3"),
        LATER("geglu", "pp4,interleaved_1f1b"),
        LATER("learned", "dp2,pp2,tp2,sequence"),
        LATER("learned", "dp4,zero2,mbs2"),
        LATER("mixtral", "dp2,tp2,zero3"),
        LATER("mixtral", "cp2,pp2,zb_v"),
        LATER("mixtral", "dp2,pp2,full"),
        LATER("deepseek", "dp2,pp2,tp2,sequence"),
        LATER("deepseek", "pp4,interleaved_1f1b"),
        LATER("deepseek", "cp2,tp2,sequence"),
        ("kimi", "cp2,tp2,sequence"),
        long_row("kimi", "dp2,pp2,tp2,sequence"),
        long_row("kimi", "cp2,pp2,zb_v"),
        LATER("kimi", "dp2,tp2,zero3"),
        long_row("yarn", "dp2,pp2,tp2,sequence"),
        LATER("yarn", "cp2,tp2,sequence"),
        ("qwen2", "pp2,zb_h1"),
        LATER("qwen2", "dp4,zero2,mbs2"),
        LATER("qwen2", "tp2"),
        LATER("olmoe", "cp2,tp2,sequence"),
        LATER("olmoe", "dp2,pp2,full"),
        ("gpt2 by layers", "dp4,zero2,mbs2"),
        LATER("gpt2 by layers", "dp2,pp2,tp2,sequence"),
        LATER("llama alike", "dp2,tp2,zero3"),
        LATER("llama alike", "pp4,interleaved_1f1b"),
        LATER("gpt2 smoothed", "dp2,tp4,sequence,zero3"),
        LATER("gpt2 smoothed", "dp4,zero2"),
        ("llama z", "pp4,zb_h1"),
        LATER("llama z", "dp2,pp2,tp2"),
        LATER("t5 both", "dp2,pp2,tp2"),
        LATER("t5 both", "pp4,zb_h1"),
    ],
)
def test_a_layout_has_the_numbers_of_one_process(
    name: str, layout: str, pool: RankPool, references: References
) -> None:
    chosen = parse_layout(layout)
    global_batch = size_for(chosen).global_batch
    config = model(name, chosen)
    assert_agrees(config, chosen, pool, references, global_batch=global_batch, steps=3)
