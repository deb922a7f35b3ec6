"""GPT-2 (``meshwright_models.gpt2:build``).

In transformers its linears are Conv1D with weights (inputs, outputs), and q, k and v are one fused
linear.
"""

from __future__ import annotations

from typing import Any

from meshwright_interop.huggingface.convert.family import Family, Options
from meshwright_interop.huggingface.convert.settings import (
    MAX_LAYERS,
    MAX_ROWS,
    MAX_WIDTH,
    Field,
    Settings,
    read_fields,
    write_fields,
)
from meshwright_interop.huggingface.convert.tables import gpt2_rules

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
FIELDS = (
    Field("vocab_size", "vocab_size", default=50257, maximum=MAX_ROWS),
    Field("n_embd", "hidden_size", default=768, maximum=MAX_WIDTH),
    Field("n_layer", "num_layers", default=12, maximum=MAX_LAYERS),
    Field("n_head", "num_heads", default=12, maximum=MAX_WIDTH),
    Field("n_positions", "max_sequence_length", default=1024, maximum=MAX_ROWS),
    Field("tie_word_embeddings", "tied", "flag", True),
    Field(
        "n_inner",
        "ffn_size",
        default=lambda options: 4 * options["hidden_size"],
        maximum=4 * MAX_WIDTH,
    ),
    Field("layer_norm_epsilon", "norm_eps", "positive", 1e-5),
)


def read(settings: Settings) -> dict[str, Any]:
    """Convert a GPT2Config to model.options."""
    settings.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    settings.must_be("scale_attn_weights", True)
    settings.must_be("scale_attn_by_inverse_layer_idx", False)
    settings.must_be("add_cross_attention", False)
    settings.must_be("is_causal", True)
    settings.get("reorder_and_upcast_attn")  # same function, other rounding in half precision
    dropouts = {name: settings.real(name, 0.1, maximum=1.0) for name in DROPOUTS}
    if len(set(dropouts.values())) > 1:
        values = ", ".join(f"{name} = {value}" for name, value in dropouts.items())
        settings.notes.append(
            f"{settings.place}: {values}: meshwright has one for all, model.options.dropout ="
            f" {dropouts['resid_pdrop']}"
        )
    return read_fields(settings, FIELDS) | {"dropout": dropouts["resid_pdrop"]}


def write(options: Options) -> dict[str, Any]:
    """Convert model.options to a GPT2Config. ``n_inner`` is null for the usual 4 x hidden,
    as in released files.
    """
    ffn_size, hidden = options["ffn_size"], options["hidden_size"]
    inner = None if ffn_size in (None, 4 * hidden) else ffn_size
    return write_fields(options, FIELDS) | {
        "n_inner": inner,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        **dict.fromkeys(DROPOUTS, options["dropout"]),
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "meshwright_models.gpt2:build",
    read,
    write,
    lambda options: None,
    gpt2_rules,
    ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    "transformer.",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
