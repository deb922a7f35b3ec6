"""GPT-2 (``meshwright_models.gpt2:build``).

In transformers its linears are Conv1D with weights (inputs, outputs), and q, k and v are one fused linear.
"""

from __future__ import annotations

from typing import Any

from meshwright_interop.huggingface.convert.family import Family, Options
from meshwright_interop.huggingface.convert.settings import MAX_LAYERS, MAX_ROWS, MAX_WIDTH, Settings
from meshwright_interop.huggingface.rules import TensorMapping, unchanged


def rules(options: Options) -> list[TensorMapping]:
    """Return the rules of all tensors.

    The fused qkv of transformers holds all heads of q, then k, then v. In meshwright q, k and v of a head are adjacent.
    """
    heads = options["num_heads"]
    head_dim = options["hidden_size"] // heads
    tied = options["tied"]
    mappings = [
        TensorMapping(
            "embedding.tokens.weight", ("transformer.wte.weight",), same_as=("lm_head.weight",) if tied else ()
        ),
        unchanged("embedding.positions.weight", "transformer.wpe.weight"),
    ]
    for i in range(options["num_layers"]):
        ours, theirs = f"block{i}", f"transformer.h.{i}"
        qkv = {"units": heads, "rows": (head_dim,) * 3, "stacked": True, "transposed": True}
        mappings += _weight_and_bias(f"{ours}.attention_norm", f"{theirs}.ln_1")
        mappings += _weight_and_bias(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", **qkv)
        mappings += _weight_and_bias(f"{ours}.attention.out", f"{theirs}.attn.c_proj", transposed=True)
        mappings += _weight_and_bias(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        mappings += _weight_and_bias(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", transposed=True)
        mappings += _weight_and_bias(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", transposed=True)
    mappings += _weight_and_bias("norm", "transformer.ln_f")
    return mappings if tied else [*mappings, unchanged("head.weight", "lm_head.weight")]


def _weight_and_bias(ours: str, theirs: str, **layout: Any) -> list[TensorMapping]:
    return [TensorMapping(f"{ours}.{kind}", (f"{theirs}.{kind}",), **layout) for kind in ("weight", "bias")]


def read(settings: Settings) -> dict[str, Any]:
    """Convert a GPT2Config to model.options."""
    settings.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    settings.must_be("scale_attn_weights", True)
    settings.must_be("scale_attn_by_inverse_layer_idx", False)
    settings.must_be("add_cross_attention", False)
    settings.must_be("is_causal", True)
    settings.get("reorder_and_upcast_attn")  # same function, other rounding in half precision
    hidden = settings.number("n_embd", 768, maximum=MAX_WIDTH)
    dropouts = {name: settings.real(name, 0.1, maximum=1.0) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(set(dropouts.values())) > 1:
        values = ", ".join(f"{name} = {value}" for name, value in dropouts.items())
        settings.notes.append(
            f"{settings.place}: {values}: meshwright has one for all, model.options.dropout = {dropouts['resid_pdrop']}"
        )
    return {
        "vocab_size": settings.number("vocab_size", 50257, maximum=MAX_ROWS),
        "hidden_size": hidden,
        "num_layers": settings.number("n_layer", 12, maximum=MAX_LAYERS),
        "num_heads": settings.number("n_head", 12, maximum=MAX_WIDTH),
        "max_sequence_length": settings.number("n_positions", 1024, maximum=MAX_ROWS),
        "dropout": dropouts["resid_pdrop"],
        "tied": settings.flag("tie_word_embeddings", True),
        "ffn_size": settings.number("n_inner", 4 * hidden, maximum=4 * MAX_WIDTH),
        "norm_eps": settings.positive("layer_norm_epsilon", 1e-5),
    }


def write(options: Options) -> dict[str, Any]:
    """Convert model.options to a GPT2Config. ``n_inner`` is null for the usual 4 x hidden, as in released files."""
    ffn_size, hidden = options["ffn_size"], options["hidden_size"]
    return {
        "vocab_size": options["vocab_size"],
        "n_embd": hidden,
        "n_layer": options["num_layers"],
        "n_head": options["num_heads"],
        "n_positions": options["max_sequence_length"],
        "n_inner": None if ffn_size in (None, 4 * hidden) else ffn_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": options["norm_eps"],
        "scale_attn_weights": True,
        "resid_pdrop": options["dropout"],
        "embd_pdrop": options["dropout"],
        "attn_pdrop": options["dropout"],
        "tie_word_embeddings": options["tied"],
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "meshwright_models.gpt2:build",
    read,
    write,
    lambda options: None,
    rules,
    ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    "transformer.",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
