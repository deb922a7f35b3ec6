"""Tensors of all families: the name in our models, in transformers, and what happens on the way.

    ours                    theirs                      what happens
    attention.qkv.weight    {q,k,v}_proj.weight         fused, the heads of a group side by side
    experts.gate_up         experts.#.{gate,up}_proj    fused, and an expert is a matrix of ours

Layouts are numbers of units and rows, see :mod:`rules`; they follow from the model's options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright_interop.huggingface.convert.family import Options
from meshwright_interop.huggingface.rules import Layouts, TensorMapping, TensorPattern, TensorTable

# -- GPT-2: linears are Conv1D, (inputs, outputs)

GPT2_FIRST = (
    TensorPattern("embedding.tokens.weight", "transformer.wte.weight", copies="lm_head.weight"),
    TensorPattern("embedding.positions.weight", "transformer.wpe.weight"),
)
GPT2_BLOCK = (
    TensorPattern("block*.attention_norm.%", "transformer.h.*.ln_1.%"),
    TensorPattern("block*.attention.qkv.%", "transformer.h.*.attn.c_attn.%", "stacked heads"),
    TensorPattern("block*.attention.out.%", "transformer.h.*.attn.c_proj.%", "transposed"),
    TensorPattern("block*.mlp_norm.%", "transformer.h.*.ln_2.%"),
    TensorPattern("block*.mlp.up.%", "transformer.h.*.mlp.c_fc.%", "transposed"),
    TensorPattern("block*.mlp.down.%", "transformer.h.*.mlp.c_proj.%", "transposed"),
)
GPT2_LAST = (
    TensorPattern("norm.%", "transformer.ln_f.%"),
    TensorPattern("head.weight", "lm_head.weight", needs="!tied"),
)


def gpt2_rules(options: Options) -> list[TensorMapping]:
    """Return the rules of a GPT-2."""
    heads = options["num_heads"]
    head_dim = options["hidden_size"] // heads
    stacked = {"units": heads, "rows": (head_dim,) * 3, "stacked": True, "transposed": True}
    layouts: Layouts = {"stacked heads": stacked, "transposed": {"transposed": True}}
    blocks = [(GPT2_BLOCK, range(options["num_layers"]))]
    return TensorTable(GPT2_FIRST, blocks, GPT2_LAST).rules(options, layouts)


# -- Llama and its relatives, with experts and latent attention

FIRST = (
    TensorPattern("embedding.tokens.weight", "model.embed_tokens.weight", copies="lm_head.weight"),
)
LAST = (
    TensorPattern("norm.weight", "model.norm.weight"),
    TensorPattern("head.weight", "lm_head.weight", needs="!tied !mtp_layers"),
    TensorPattern("head.linear.weight", "lm_head.weight", needs="!tied mtp_layers"),
)


def _of_block(*rows: tuple[str, ...]) -> tuple[TensorPattern, ...]:
    """Return rows whose names are those below a block."""
    return tuple(
        TensorPattern(f"block*.{ours}", f"model.layers.*.{theirs}", *rest)
        for ours, theirs, *rest in rows
    )


NORMS = _of_block(
    ("attention_norm.weight", "input_layernorm.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight"),
)
ATTENTION = _of_block(
    ("attention.qkv.weight", "self_attn.{q,k,v}_proj.weight", "heads"),
    ("attention.qkv.bias", "self_attn.{q,k,v}_proj.bias", "heads", "qkv_bias"),
    ("attention.q_norm.weight", "self_attn.q_norm.weight", "", "qk_norm"),
    ("attention.k_norm.weight", "self_attn.k_norm.weight", "", "qk_norm"),
    ("attention.out.weight", "self_attn.o_proj.weight"),
    ("attention.out.bias", "self_attn.o_proj.bias", "", "out_bias"),
)
LATENT_QUERY = _of_block(("attention.q.weight", "self_attn.q_proj.weight", "rotated heads"))
"""Query of a latent attention without ``q_rank``."""
LATENT_LOW_RANK_QUERY = _of_block(
    ("attention.q_down.weight", "self_attn.q_a_proj.weight"),
    ("attention.q_norm.weight", "self_attn.q_a_layernorm.weight"),
    ("attention.q_up.weight", "self_attn.q_b_proj.weight", "rotated heads"),
)
LATENT = _of_block(
    ("attention.kv_down.weight", "self_attn.kv_a_proj_with_mqa.weight", "rotated latent"),
    ("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
    ("attention.kv_up.weight", "self_attn.kv_b_proj.weight"),
    ("attention.out.weight", "self_attn.o_proj.weight"),
)
MLP = _of_block(
    ("mlp.gate_up.weight", "mlp.{gate,up}_proj.weight", "gated"),
    ("mlp.gate_up.bias", "mlp.{gate,up}_proj.bias", "gated", "mlp_bias"),
    ("mlp.down.weight", "mlp.down_proj.weight"),
    ("mlp.down.bias", "mlp.down_proj.bias", "", "mlp_bias"),
)
EXPERTS = _of_block(
    ("mlp.router.weight", "mlp.gate.weight"),
    ("mlp.experts.gate_up", "mlp.experts.#.{gate,up}_proj.weight", "expert"),
    ("mlp.experts.down", "mlp.experts.#.down_proj.weight"),
)
MIXTRAL_EXPERTS = _of_block(
    ("mlp.router.weight", "block_sparse_moe.gate.weight"),
    ("mlp.experts.gate_up", "block_sparse_moe.experts.#.{w1,w3}.weight", "expert"),
    ("mlp.experts.down", "block_sparse_moe.experts.#.w2.weight"),
)
ROUTER_BIAS = _of_block(("mlp.router.bias", "mlp.gate.e_score_correction_bias", "exact"))
SHARED_EXPERTS = _of_block(
    ("mlp.shared.gate_up.weight", "mlp.shared_experts.{gate,up}_proj.weight", "shared"),
    ("mlp.shared.down.weight", "mlp.shared_experts.down_proj.weight"),
)

MOE_DEFAULTS: dict[str, Any] = {
    "scaling": 1.0,
    "num_groups": 1,
    "groups_per_token": 1,
    "router": "softmax",
    "group_score": "top2",
    "normalise": True,
    "balance": "none",
    "shared_ffn_size": 0,
    "shared_gate": False,
    "first_dense": 0,
}
"""Options of ``moe`` that change the logits, with their defaults."""


def with_defaults_of(moe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a table ``moe``, with the defaults of those that change the logits."""
    return MOE_DEFAULTS | dict(moe)


def decoder_rules(
    options: Options, experts: tuple[TensorPattern, ...] = EXPERTS
) -> list[TensorMapping]:
    """Return the rules of a Llama or one of its relatives. ``experts``: rows of their tensors."""
    all_layers = range(options["num_layers"])
    moe = None if options["moe"] is None else with_defaults_of(options["moe"])
    num_dense = len(all_layers) if moe is None else moe["first_dense"]
    dense, sparse = all_layers[:num_dense], all_layers[num_dense:]
    blocks = [(NORMS[:1], all_layers)]
    blocks += [(part, all_layers) for part in _attention(options)]
    blocks += [(NORMS[1:], all_layers), (MLP, dense)]
    if moe is not None:
        blocks.append((experts, sparse))
        blocks += [(ROUTER_BIAS, sparse)] if moe["balance"] == "bias" else []
        blocks += [(SHARED_EXPERTS, sparse)] if moe["shared_ffn_size"] else []
    table = TensorTable(FIRST, blocks, LAST)
    num_experts = 0 if moe is None else moe["num_experts"]
    return table.rules(options, _decoder_layouts(options, moe or {}), num_experts)


def _attention(options: Options) -> list[tuple[TensorPattern, ...]]:
    """Return the rows of a block's attention."""
    if options["mla"] is None:
        return [ATTENTION]
    has_rank = options["mla"].get("q_rank") is not None
    return [LATENT_LOW_RANK_QUERY if has_rank else LATENT_QUERY, LATENT]


def _decoder_layouts(options: Options, moe: Mapping[str, Any]) -> Layouts:
    """Return the layouts of a decoder."""
    heads, kv_heads = options["num_heads"], options["num_kv_heads"]
    head_dim = options["head_dim"] or options["hidden_size"] // heads
    group = (heads // kv_heads * head_dim, head_dim, head_dim)
    size = moe.get("expert_ffn_size") or options["ffn_size"]
    mla = options["mla"] or {"rope_dim": 0, "nope_dim": 0, "kv_rank": 0}
    rope = mla["rope_dim"]
    return {
        "heads": {"units": kv_heads, "rows": group},
        "gated": _gated(options["ffn_size"], kv_heads),
        "shared": _gated(moe.get("shared_ffn_size") or kv_heads, kv_heads),
        "expert": {"rows": (size, size)},
        "exact": {"keeps_dtype": True},
        "rotated heads": {"pairs": (mla["nope_dim"] + rope, rope)},
        "rotated latent": {"pairs": (mla["kv_rank"] + rope, rope)},
    }


def _gated(ffn_size: int, heads: int) -> dict[str, Any]:
    """Return the layout of gate and up in one linear: blocks that a tensor-parallel rank can hold
    whole.
    """
    num_blocks = math.gcd(ffn_size, heads)
    return {"units": num_blocks, "rows": (ffn_size // num_blocks,) * 2}


# -- T5: the relative position bias is a parameter of the first block of a stack; here all have it,
# tied

T5_FIRST = (
    TensorPattern(
        "encoder_embedding.tokens.weight",
        "shared.weight",
        copies="encoder.embed_tokens.weight decoder.embed_tokens.weight lm_head.weight",
    ),
)
T5_LAST = (
    TensorPattern("encoder_norm.norm.weight", "encoder.final_layer_norm.weight"),
    TensorPattern("decoder_norm.norm.weight", "decoder.final_layer_norm.weight"),
    TensorPattern("head.weight", "lm_head.weight", needs="!tied"),
)


def _of_stack(stack: str, number: int, *rows: tuple[str, ...]) -> tuple[TensorPattern, ...]:
    """Return rows whose names are those below a block of a stack, and below its part ``number``."""
    theirs = f"{stack}.block.*.layer.{number}."
    return tuple(TensorPattern(f"{stack}*.{row[0]}", f"{theirs}{row[1]}", *row[2:]) for row in rows)


def _t5_attention(stack: str) -> tuple[TensorPattern, ...]:
    return _of_stack(
        stack,
        0,
        ("attention.qkv.weight", "SelfAttention.{q,k,v}.weight", "heads"),
        ("attention.out.weight", "SelfAttention.o.weight"),
        ("attention_norm.weight", "layer_norm.weight"),
    )


def _t5_bias(stack: str) -> tuple[TensorPattern, ...]:
    theirs = "SelfAttention.relative_attention_bias.weight"
    return _of_stack(stack, 0, ("attention.relative_bias.weight", theirs))


def _t5_mlp(stack: str, number: int) -> tuple[TensorPattern, ...]:
    return _of_stack(
        stack,
        number,
        ("mlp.up.weight", "DenseReluDense.wi.weight", "", "!gated"),
        ("mlp.up.weight", "DenseReluDense.{wi_0,wi_1}.weight", "gated", "gated"),
        ("mlp.down.weight", "DenseReluDense.wo.weight"),
        ("mlp_norm.weight", "layer_norm.weight"),
    )


T5_CROSS_ATTENTION = _of_stack(
    "decoder",
    1,
    ("cross_attention.q.weight", "EncDecAttention.q.weight"),
    ("cross_attention.kv.weight", "EncDecAttention.{k,v}.weight", "kv heads"),
    ("cross_attention.out.weight", "EncDecAttention.o.weight"),
    ("cross_attention_norm.weight", "layer_norm.weight"),
)


def t5_rules(options: Options) -> list[TensorMapping]:
    """Return the rules of a T5."""
    heads = options["num_heads"]
    head_dim = options["head_dim"] or options["hidden_size"] // heads
    layouts: Layouts = {
        "heads": {"units": heads, "rows": (head_dim,) * 3},
        "kv heads": {"units": heads, "rows": (head_dim,) * 2},
        "gated": _gated(options["ffn_size"] or 4 * options["hidden_size"], heads),
    }
    encoder = range(options["num_layers"])
    decoder = range(options["num_decoder_layers"] or options["num_layers"])
    blocks = [
        (_t5_attention("encoder"), encoder),
        (_t5_bias("encoder"), range(1)),
        (_t5_mlp("encoder", 1), encoder),
        (_t5_attention("decoder"), decoder),
        (_t5_bias("decoder"), range(1)),
        (T5_CROSS_ATTENTION, decoder),
        (_t5_mlp("decoder", 2), decoder),
    ]
    return TensorTable(T5_FIRST, blocks, T5_LAST).rules(options, layouts)
