"""Small random models of transformers, as their users have them: a directory with a configuration,
perhaps weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.config import RunConfig
from meshwright_interop.huggingface.restructure.library import import_transformers

SMALL: dict[str, Any] = {
    "vocab_size": 67,  # no degree but 1 divides it
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,  # functional dropouts, which are refused
    "attention_probs_dropout_prob": 0.0,
    "attn_pdrop": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
}
WINDOW = {"sliding_window": 5}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
"""Attention by latent vectors (MLA): positions turn a part of each head."""
GROUPED = {"n_group": 2, "topk_group": 1}
"""Experts in groups, of which a token uses one."""
DECODER = {
    "is_encoder_decoder": False,
    "decoder_layers": 3,
    "decoder_ffn_dim": 64,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "dropout": 0.0,
}
"""The decoder of an encoder-decoder, alone."""

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "cohere2": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **WINDOW,
    },
    "olmo3": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **WINDOW,
    },
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "phi3": {"resid_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "tie_word_embeddings": True,
    },
    "starcoder2": WINDOW,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    **dict.fromkeys(("minicpm3", "youtu", "deepseek_v2", "axk2"), LATENT),
    **dict.fromkeys(("axk1", "glm4_moe_lite"), LATENT | GROUPED),
    "deepseek_v3": LATENT | GROUPED | {"first_k_dense_replace": 1},
    "deepseek_v32": LATENT
    | GROUPED
    | {"first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "glm_moe_dsa": LATENT
    | {"first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    | {"qk_head_dim": 12},
    "deepseek_v4": WINDOW
    | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "num_hash_layers": 0}
    | {"q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "mlp_layer_types": ["moe"] * 3}
    | {
        "layer_types": [
            f"{kind}_attention" for kind in ("heavily_compressed", "compressed_sparse", "sliding")
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
    },
    "gemma4_text": WINDOW
    | {"hidden_size_per_layer_input": 0, "global_head_dim": 8, "enable_moe_block": True}
    | {"top_k_experts": 2, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "bailing_hybrid": GROUPED,
    "dots1": GROUPED | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba"]},
    "xmod": {"default_language": "en_XX"},
    "bamba": {"mamba_n_heads": 8},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "chunk_size": 8},
    "opt": {"dropout": 0.0},
    "xglm": {"dropout": 0.0},
    "trocr": {"dropout": 0.0},
    "roc_bert": {
        f"{part}_{size}": 67
        for part in ("pronunciation", "shape")
        for size in ("vocab_size", "embed_dim")
    },
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "xlnet": {"d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "dots3_note_text": LATENT
    | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "per_layer_config": {}, **WINDOW}
    | {"shared_experts_intermediate_size": 24, "head_dim": 12},
    "longcat_flash": LATENT | {"num_layers": 2, "zero_expert_num": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "biogpt": {"hidden_dropout_prob": 0.0},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": DECODER | {"attention_type": "original_full"},
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "marian", "mbart"), DECODER),
    **dict.fromkeys(("mvp", "pegasus", "plbart", "whisper"), DECODER),
}
"""What makes an architecture itself: windows, ties, scalings, dropouts in modules;
and sizes that fit each other.
"""


COMPOSITE = ("emu3", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
"""Architectures whose language model has a configuration of its own inside."""


def configuration(kind: str, **more: Any) -> Any:
    """A transformers configuration, small; keys that the kind does not have are left out."""
    of_kind = import_transformers().CONFIG_MAPPING[kind]
    keys = _small(of_kind)
    if kind in COMPOSITE:
        keys["text_config"] = _small(of_kind.sub_configs["text_config"])
    return of_kind(**{**keys, **SPECIAL.get(kind, {}), **more})


def _small(of_kind: Any) -> dict[str, Any]:
    known = {*vars(of_kind()), *getattr(of_kind, "attribute_map", {})}
    return {name: value for name, value in SMALL.items() if name in known}


def directory(
    kind: str, place: Path, *, weights: bool = False, shard: str = "5GB", **more: Any
) -> Path:
    """``place/kind`` with the configuration, and with weights where they are asked for."""
    config, path = configuration(kind, **more), place / kind
    if weights:
        torch.manual_seed(3)
        model = import_transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(path, max_shard_size=shard)
    else:
        mapping = import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING
        config.architectures = [mapping[type(config)].__name__] if type(config) in mapping else None
        config.save_pretrained(path)
    return path


def run_config(path: Path, **sections: dict[str, Any]) -> RunConfig:
    """A training of it; without a corpus: random tokens do."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"builder": f"hf:{path}"},
        "data": {"train": str(path / "nothing"), "sequence_length": 12},
        "batch": {"micro_batch_size": 1, "global_batch": 4},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 2, "device": "cpu"},
        "tracking": {"console": False},
    }
    for section, keys in sections.items():
        tree.setdefault(section, {}).update(keys)
    return RunConfig.model_validate(tree)
