"""T5, version 1.0 and 1.1 (``meshwright_models.t5:build``).

In transformers the relative position bias is a parameter of the first block of each stack. In meshwright every block
has it, and the copies of one stack are tied.
"""

from __future__ import annotations

import math
from typing import Any

from meshwright_interop.huggingface.convert.family import Family, Options
from meshwright_interop.huggingface.convert.settings import MAX_LAYERS, MAX_ROWS, MAX_WIDTH, Settings
from meshwright_interop.huggingface.rules import TensorMapping, unchanged

FORMS = {
    "relu": {"is_gated_act": False, "dense_act_fn": "relu"},
    "gated-gelu": {"is_gated_act": True, "dense_act_fn": "gelu_new"},
}
"""``feed_forward_proj`` -> the fields that follow from it. If they contradict it, transformers uses the fields."""


def rules(options: Options) -> list[TensorMapping]:
    """Return the rules of all tensors. The two embeddings are one tensor, ``shared``, under up to four names."""
    heads = options["num_heads"]
    head_dim = options["head_dim"] or options["hidden_size"] // heads
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    copies += ["lm_head.weight"] if options["tied"] else []
    mappings = [TensorMapping("encoder_embedding.tokens.weight", ("shared.weight",), same_as=tuple(copies))]
    depths = {"encoder": options["num_layers"], "decoder": options["num_decoder_layers"] or options["num_layers"]}
    for stack, depth in depths.items():
        for i in range(depth):
            ours, theirs = f"{stack}{i}", f"{stack}.block.{i}.layer"
            attention = f"{theirs}.0.SelfAttention"
            names = tuple(f"{attention}.{part}.weight" for part in "qkv")
            mappings.append(TensorMapping(f"{ours}.attention.qkv.weight", names, heads, (head_dim,) * 3))
            mappings.append(unchanged(f"{ours}.attention.out.weight", f"{attention}.o.weight"))
            if i == 0:
                bias = f"{attention}.relative_attention_bias.weight"
                mappings.append(unchanged(f"{ours}.attention.relative_bias.weight", bias))
            mappings.append(unchanged(f"{ours}.attention_norm.weight", f"{theirs}.0.layer_norm.weight"))
            if stack == "decoder":
                cross = f"{theirs}.1.EncDecAttention"
                mappings.append(unchanged(f"{ours}.cross_attention.q.weight", f"{cross}.q.weight"))
                names = tuple(f"{cross}.{part}.weight" for part in "kv")
                mappings.append(TensorMapping(f"{ours}.cross_attention.kv.weight", names, heads, (head_dim,) * 2))
                mappings.append(unchanged(f"{ours}.cross_attention.out.weight", f"{cross}.o.weight"))
                mappings.append(unchanged(f"{ours}.cross_attention_norm.weight", f"{theirs}.1.layer_norm.weight"))
            last = f"{theirs}.{1 if stack == 'encoder' else 2}"
            mappings.append(_up(options, f"{ours}.mlp.up.weight", f"{last}.DenseReluDense"))
            mappings.append(unchanged(f"{ours}.mlp.down.weight", f"{last}.DenseReluDense.wo.weight"))
            mappings.append(unchanged(f"{ours}.mlp_norm.weight", f"{last}.layer_norm.weight"))
        mappings.append(unchanged(f"{stack}_norm.norm.weight", f"{stack}.final_layer_norm.weight"))
    return mappings if options["tied"] else [*mappings, unchanged("head.weight", "lm_head.weight")]


def _up(options: Options, ours: str, theirs: str) -> TensorMapping:
    """Return the rule of the up projection, in blocks of gate and up rows: see ``models.t5_layers.T5Mlp``."""
    if not options["gated"]:
        return unchanged(ours, f"{theirs}.wi.weight")
    ffn_size = options["ffn_size"] or 4 * options["hidden_size"]
    num_blocks = math.gcd(ffn_size, options["num_heads"])
    size = ffn_size // num_blocks
    return TensorMapping(ours, (f"{theirs}.wi_0.weight", f"{theirs}.wi_1.weight"), num_blocks, (size, size))


def read(settings: Settings) -> dict[str, Any]:
    """Convert a T5Config to model.options.

    ``tie_word_embeddings`` is false in version 1.1. transformers 5 has a field of its own for the scaling.
    """
    settings.must_be("feed_forward_proj", *FORMS)
    form = settings.get("feed_forward_proj", "relu")
    settings.must_be("is_causal", True)
    for name, value in FORMS.get(str(form), {}).items():
        settings.must_be(name, value)
    for name in ("is_decoder", "n_positions"):
        settings.get(name)  # without effect
    tied = settings.get("tie_word_embeddings") is None or settings.flag("tie_word_embeddings", True)
    num_layers = settings.number("num_layers", 6, maximum=MAX_LAYERS)
    padding_id = settings.number("pad_token_id", 0, minimum=-1, maximum=MAX_ROWS)
    return {
        "vocab_size": settings.number("vocab_size", 32128, maximum=MAX_ROWS),
        "hidden_size": settings.number("d_model", 512, maximum=MAX_WIDTH),
        "num_layers": num_layers,
        "num_heads": settings.number("num_heads", 8, maximum=MAX_WIDTH),
        "head_dim": settings.number("d_kv", 64, maximum=MAX_WIDTH),
        "ffn_size": settings.number("d_ff", 2048, maximum=MAX_WIDTH),
        "num_decoder_layers": settings.number("num_decoder_layers", num_layers, maximum=MAX_LAYERS),
        "gated": form == "gated-gelu",
        "tied": tied,
        "scaled": settings.flag("scale_decoder_outputs", tied and "scale_decoder_outputs" not in settings.fields),
        "dropout": settings.real("dropout_rate", 0.1, maximum=1.0),
        "num_buckets": settings.number("relative_attention_num_buckets", 32, maximum=MAX_WIDTH),
        "max_distance": settings.number("relative_attention_max_distance", 128, maximum=MAX_WIDTH),
        "padding_id": padding_id,
        "norm_eps": settings.positive("layer_norm_epsilon", 1e-6),
    }


def write(options: Options) -> dict[str, Any]:
    """Convert model.options to a T5Config.

    transformers 4 scales the decoder outputs exactly if the head is tied; 5 reads ``scale_decoder_outputs``.
    """
    hidden, heads, tied = options["hidden_size"], options["num_heads"], options["tied"]
    scaled = tied if options["scaled"] is None else options["scaled"]
    return {
        "vocab_size": options["vocab_size"],
        "d_model": hidden,
        "d_kv": options["head_dim"] or hidden // heads,
        "d_ff": options["ffn_size"] or 4 * hidden,
        "num_layers": options["num_layers"],
        "num_decoder_layers": options["num_decoder_layers"] or options["num_layers"],
        "num_heads": heads,
        "relative_attention_num_buckets": options["num_buckets"],
        "relative_attention_max_distance": options["max_distance"],
        "feed_forward_proj": "gated-gelu" if options["gated"] else "relu",
        "dropout_rate": options["dropout"],
        "layer_norm_epsilon": options["norm_eps"],
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": scaled,
        "pad_token_id": max(options["padding_id"], 0),
        "decoder_start_token_id": max(options["padding_id"], 0),
        "is_encoder_decoder": True,
    }


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    "meshwright_models.t5:build",
    read,
    write,
    lambda options: None,
    rules,
    ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    head_by_file=True,
    task="span_corruption",
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
)
