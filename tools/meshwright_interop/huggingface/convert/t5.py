"""T5, version 1.0 and 1.1 (``meshwright_models.t5:build``).

In transformers the relative position bias is a parameter of the first block of each stack. In
meshwright every block has it, and the copies of one stack are tied.
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
from meshwright_interop.huggingface.convert.tables import t5_rules

FORMS = {
    "relu": {"is_gated_act": False, "dense_act_fn": "relu"},
    "gated-gelu": {"is_gated_act": True, "dense_act_fn": "gelu_new"},
}
"""``feed_forward_proj`` -> the fields that follow from it. If they contradict it,
transformers uses the fields.
"""


FIELDS = (
    Field("vocab_size", "vocab_size", default=32128, maximum=MAX_ROWS),
    Field("d_model", "hidden_size", default=512, maximum=MAX_WIDTH),
    Field("num_layers", "num_layers", default=6, maximum=MAX_LAYERS),
    Field("num_heads", "num_heads", default=8, maximum=MAX_WIDTH),
    Field("d_kv", "head_dim", default=64, maximum=MAX_WIDTH),
    Field("d_ff", "ffn_size", default=2048, maximum=MAX_WIDTH),
    Field(
        "num_decoder_layers",
        "num_decoder_layers",
        default=lambda options: options["num_layers"],
        maximum=MAX_LAYERS,
    ),
    Field("dropout_rate", "dropout", "real", 0.1, maximum=1.0),
    Field("relative_attention_num_buckets", "num_buckets", default=32, maximum=MAX_WIDTH),
    Field("relative_attention_max_distance", "max_distance", default=128, maximum=MAX_WIDTH),
    Field("layer_norm_epsilon", "norm_eps", "positive", 1e-6),
)


def read(settings: Settings) -> dict[str, Any]:
    """Convert a T5Config to model.options.

    ``tie_word_embeddings`` is false in version 1.1. transformers 5 has a field of its own for the
    scaling.
    """
    settings.must_be("feed_forward_proj", *FORMS)
    form = settings.get("feed_forward_proj", "relu")
    settings.must_be("is_causal", True)
    for name, value in FORMS.get(str(form), {}).items():
        settings.must_be(name, value)
    for name in ("is_decoder", "n_positions"):
        settings.get(name)  # without effect
    tied = settings.get("tie_word_embeddings") is None or settings.flag("tie_word_embeddings", True)
    is_scaled = tied and "scale_decoder_outputs" not in settings.fields
    return read_fields(settings, FIELDS) | {
        "gated": form == "gated-gelu",
        "tied": tied,
        "scaled": settings.flag("scale_decoder_outputs", is_scaled),
        "padding_id": settings.number("pad_token_id", 0, minimum=-1, maximum=MAX_ROWS),
    }


def write(options: Options) -> dict[str, Any]:
    """Convert model.options to a T5Config.

    transformers 4 scales the decoder outputs exactly if the head is tied; 5 reads
    ``scale_decoder_outputs``.
    """
    hidden, heads, tied = options["hidden_size"], options["num_heads"], options["tied"]
    complete = {
        **options,
        "head_dim": options["head_dim"] or hidden // heads,
        "ffn_size": options["ffn_size"] or 4 * hidden,
        "num_decoder_layers": options["num_decoder_layers"] or options["num_layers"],
    }
    padding_id = max(options["padding_id"], 0)
    return write_fields(complete, FIELDS) | {
        "feed_forward_proj": "gated-gelu" if options["gated"] else "relu",
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied if options["scaled"] is None else options["scaled"],
        "pad_token_id": padding_id,
        "decoder_start_token_id": padding_id,
        "is_encoder_decoder": True,
    }


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    "meshwright_models.t5:build",
    read,
    write,
    lambda options: None,
    t5_rules,
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
