"""Rules of the tensors of Llama and its relatives, part by part of a block."""

from __future__ import annotations

import math

from meshwright_interop.huggingface.convert.family import Options
from meshwright_interop.huggingface.rules import TensorMapping, unchanged


def rules(options: Options) -> list[TensorMapping]:
    """Return the rules of all tensors, for all four families. Optional ones (biases, q and k norms) follow options."""
    mappings = embedding_rules(options)
    for i in range(options["num_layers"]):
        ours, theirs = f"block{i}", f"model.layers.{i}"
        mappings += [*attention_rules(options, ours, theirs), *norm_rules(ours, theirs)]
        mappings += gated_rules(options, f"{ours}.mlp", f"{theirs}.mlp", options["ffn_size"])
    return mappings + head_rules(options)


def embedding_rules(options: Options) -> list[TensorMapping]:
    """Return the rule of the embedding, which may be the head too."""
    same = ("lm_head.weight",) if options["tied"] else ()
    return [TensorMapping("embedding.tokens.weight", ("model.embed_tokens.weight",), same_as=same)]


def attention_rules(options: Options, ours: str, theirs: str) -> list[TensorMapping]:
    """Return the rules of the attention of a block and of the norm before it."""
    kv_heads = options["num_kv_heads"]
    head_dim = options["head_dim"] or options["hidden_size"] // options["num_heads"]
    of_group = (options["num_heads"] // kv_heads * head_dim, head_dim, head_dim)
    mappings = [unchanged(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")]
    for kind in ("weight", *(["bias"] if options["qkv_bias"] else [])):
        names = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
        mappings.append(TensorMapping(f"{ours}.attention.qkv.{kind}", names, kv_heads, of_group))
    if options["qk_norm"]:
        mappings += [
            unchanged(f"{ours}.attention.{part}_norm.weight", f"{theirs}.self_attn.{part}_norm.weight") for part in "qk"
        ]
    for kind in ("weight", *(["bias"] if options["out_bias"] else [])):
        mappings.append(unchanged(f"{ours}.attention.out.{kind}", f"{theirs}.self_attn.o_proj.{kind}"))
    return mappings


def norm_rules(ours: str, theirs: str) -> list[TensorMapping]:
    """Return the rule of the norm before the feed-forward network of a block."""
    return [unchanged(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")]


def gated_rules(options: Options, ours: str, theirs: str, ffn_size: int) -> list[TensorMapping]:
    """Return the rules of a dense feed-forward network."""
    num_blocks, mappings = math.gcd(ffn_size, options["num_kv_heads"]), []
    for kind in ("weight", *(["bias"] if options["mlp_bias"] else [])):
        names = tuple(f"{theirs}.{part}_proj.{kind}" for part in ("gate", "up"))
        size = ffn_size // num_blocks
        mappings.append(TensorMapping(f"{ours}.gate_up.{kind}", names, num_blocks, (size, size)))
        mappings.append(unchanged(f"{ours}.down.{kind}", f"{theirs}.down_proj.{kind}"))
    return mappings


def head_rules(options: Options) -> list[TensorMapping]:
    """Return the rules of the last norm, and of a head of its own."""
    head = "head.linear.weight" if options["mtp_layers"] else "head.weight"
    norm = unchanged("norm.weight", "model.norm.weight")
    return [norm] if options["tied"] else [norm, unchanged(head, "lm_head.weight")]
