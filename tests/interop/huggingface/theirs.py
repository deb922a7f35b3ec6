"""Small models of transformers with random weights, built from their configurations: no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

VOCAB = 99
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = YARN | {"beta_fast": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": False}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
LATENT |= {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
}
LATENT |= {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0}


class Case(NamedTuple):
    """One configuration of one class."""

    config: str
    model: str
    settings: dict[str, Any]


CASES = {
    "gpt2": Case("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2, own head and width": Case(
        "GPT2Config", "GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "n_inner": 24}
    ),
    "llama 2": Case(
        "LlamaConfig", "LlamaForCausalLM", SIZES | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    ),
    "llama 3": Case("LlamaConfig", "LlamaForCausalLM", SIZES | {"rope_theta": 500000.0}),
    "llama 3.1": Case("LlamaConfig", "LlamaForCausalLM", SIZES | {"rope_parameters": SCALED}),
    "llama, all biases, tied": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, YaRN": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        SIZES
        | {"rope_parameters": YARN | {"rope_theta": 100.0, "attention_factor": 0.9}}
        | {"head_dim": 16},
    ),
    "mistral, no window": Case(
        "MistralConfig", "MistralForCausalLM", SIZES | {"sliding_window": None, "head_dim": 12}
    ),
    "mistral, window": Case("MistralConfig", "MistralForCausalLM", SIZES | {"sliding_window": 5}),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "qwen2, heads of another size": Case(
        "Qwen2Config", "Qwen2ForCausalLM", SIZES | {"head_dim": 12}
    ),
    "qwen2, window": Case(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        SIZES | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    ),
    "qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", SIZES | {"head_dim": 16}),
    "qwen3, tied": Case(
        "Qwen3Config", "Qwen3ForCausalLM", SIZES | {"head_dim": 8, "tie_word_embeddings": True}
    ),
    "qwen3, YaRN": Case(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        SIZES | {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 1e6, "truncate": False}},
    ),
    "mixtral": Case(
        "MixtralConfig",
        "MixtralForCausalLM",
        SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "olmoe": Case("OlmoeConfig", "OlmoeForCausalLM", SIZES | ROUTED),
    "qwen3_moe": Case(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        SIZES | ROUTED | {"moe_intermediate_size": 24, "head_dim": 12},
    ),
    "qwen3_moe, first block dense": Case(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        SIZES
        | ROUTED
        | {"moe_intermediate_size": 24, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "deepseek_v3": Case(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", SIZES | LATENT | {"q_lora_rank": 10}
    ),
    "deepseek_v3, as Moonlight": Case(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        SIZES | LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    ),
    "deepseek_v3, YaRN": Case(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        SIZES | LATENT | {"q_lora_rank": 10, "rope_parameters": DEEPSEEK_YARN},
    ),
    "t5": Case("T5Config", "T5ForConditionalGeneration", T5),
    "t5, version 1.1": Case(
        "T5Config",
        "T5ForConditionalGeneration",
        T5
        | {
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "num_decoder_layers": 3,
        },
    ),
    "t5, own head, scaled": Case("T5Config", "T5ForConditionalGeneration", T5),
    "t5, tied, not scaled": Case(
        "T5Config", "T5ForConditionalGeneration", T5 | {"tie_word_embeddings": False}
    ),
}
OWN_HEAD = ("t5, version 1.1", "t5, own head, scaled")
"""T5's class ties its head whatever the configuration says;
the released files of version 1.1 have one of its own.
"""


def build(case: Case, *, dtype: torch.dtype = torch.float32, own_head: bool = False) -> Any:
    """A model with every number drawn, biases and norms too; ``own_head``: T5's,
    which its class always ties.
    """
    import transformers

    torch.manual_seed(7)
    model = getattr(transformers, case.model)(
        getattr(transformers, case.config)(**case.settings)
    ).eval()
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0)
            )
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model.to(dtype)


def write(
    name: str, path: Path, *, shard_size: str = "1GB", dtype: torch.dtype = torch.float32
) -> Any:
    """The model of a case as its own library writes it, with a tokenizer; the model."""
    model = build(CASES[name], dtype=dtype, own_head=name in OWN_HEAD)
    model.save_pretrained(path, max_shard_size=shard_size)
    tokenizer().save(str(path / "tokenizer.json"))
    return model


def tokenizer(vocab_size: int = VOCAB) -> Tokenizer:
    """One token for each of some words, without training."""
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, vocab_size)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<|endoftext|>"])
    return made


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """(B, S) -> (B, S, V); of an encoder-decoder the decoder reads the ids backwards,
    and 0 is padding.
    """
    if model.config.is_encoder_decoder:
        found = model(
            input_ids=ids,
            attention_mask=(ids != 0).long(),
            decoder_input_ids=ids.flip(1).contiguous(),
        )
        return found.logits  # type: ignore[no-any-return]
    return model(ids).logits  # type: ignore[no-any-return]


@torch.no_grad()
def greedy(
    layers: Callable[[Tensor], Tensor], ids: list[int], num_tokens: int, ends: set[int]
) -> list[int]:
    """The ids and the likeliest after them, one by one, up to and with an end."""
    found = list(ids)
    while len(found) < len(ids) + num_tokens:
        found.append(int(layers(torch.tensor([found]))[0, -1].argmax()))
        if found[-1] in ends:
            break
    return found


@torch.no_grad()
def our_logits(layers: Callable[[Any], Tensor], ids: Tensor, encoder_decoder: bool) -> Tensor:
    """The same of a model of ours."""
    return layers(
        {"encoder_ids": ids, "decoder_ids": ids.flip(1).contiguous()} if encoder_decoder else ids
    )
