"""``config.json`` of released models, as they stand in their repositories,
and what they have of parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Released(NamedTuple):
    """One of them."""

    fields: dict[str, Any]
    parameters: int
    """Tied ones once."""
    options: dict[str, Any]
    """Some of ours, which must come out so."""


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "use_cache": True,
}
LLAMA |= {
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
LLAMA |= {
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
ROPE_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_31 |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
QWEN = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache": True}
QWEN |= {
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "layer_norm_epsilon": 1e-06,
    "d_kv": 64,
}
T5 |= {
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "pad_token_id": 0,
}
T5 |= {
    "is_encoder_decoder": True,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
    "n_positions": 512,
}

RELEASED = {
    "openai-community/gpt2": Released(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        124_439_808,
        {"tied": True, "dropout": 0.1},
    ),
    "meta-llama/Llama-2-7b-hf": Released(
        LLAMA
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "torch_dtype": "float16",
            "vocab_size": 32000,
        },
        6_738_415_616,
        {"rope_theta": 10_000.0, "norm_eps": 1e-5, "num_kv_heads": 32},
    ),
    "meta-llama/Llama-3.1-8B": Released(
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": ROPE_31,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0",
            "vocab_size": 128256,
        },
        8_030_261_248,
        {"rope_theta": 500_000.0, "rope_scaling_factor": 8.0, "rope_original_length": 8192},
    ),
    "meta-llama/Llama-3.2-1B": Released(
        LLAMA
        | {
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": ROPE_31 | {"factor": 32.0},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        1_235_814_400,
        {"rope_scaling_factor": 32.0, "tied": True},
    ),
    "mistralai/Mistral-7B-v0.1": Released(
        {
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 32000,
        },
        7_241_732_096,
        {"sliding_window": 4096, "rope_theta": 10_000.0},
    ),
    "mistralai/Mistral-Nemo-Base-2407": Released(
        {
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 128000,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 131072,
        },
        12_247_782_400,
        {"head_dim": 128},
    ),
    "Qwen/Qwen2.5-7B": Released(
        QWEN
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "eos_token_id": 151643,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_mrope": False,
            "vocab_size": 152064,
        },
        7_615_616_512,
        {"qkv_bias": True, "rope_theta": 1_000_000.0},
    ),
    "Qwen/Qwen3-0.6B-Base": Released(
        QWEN
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "eos_token_id": 151643,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        596_049_920,
        {"qk_norm": True, "head_dim": 128, "tied": True},
    ),
    "google-t5/t5-small": Released(
        T5
        | {
            "architectures": ["T5ForConditionalGeneration"],
            "d_ff": 2048,
            "d_model": 512,
            "num_heads": 8,
            "num_layers": 6,
            "output_past": True,
            "task_specific_params": {"summarization": {"prefix": "summarize: "}},
        },
        60_506_624,
        {"tied": True, "scaled": True, "gated": False, "num_decoder_layers": 6},
    ),
    "google/t5-v1_1-base": Released(
        T5
        | {
            "d_ff": 2048,
            "d_model": 768,
            "feed_forward_proj": "gated-gelu",
            "num_decoder_layers": 12,
            "num_heads": 12,
            "num_layers": 12,
            "output_past": True,
            "tie_word_embeddings": False,
        },
        247_577_856,
        {"tied": False, "scaled": False, "gated": True},
    ),
    "google/flan-t5-base": Released(
        T5
        | {
            "d_ff": 2048,
            "d_model": 768,
            "dense_act_fn": "gelu_new",
            "feed_forward_proj": "gated-gelu",
            "is_gated_act": True,
            "num_decoder_layers": 12,
            "num_heads": 12,
            "num_layers": 12,
            "output_past": True,
            "relative_attention_max_distance": 128,
            "tie_word_embeddings": False,
        },
        247_577_856,
        {"tied": False, "scaled": False, "gated": True},
    ),
}
