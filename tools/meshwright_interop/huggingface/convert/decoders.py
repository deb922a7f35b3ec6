"""Llama, Mistral, Qwen2 and Qwen3, all built by ``meshwright_models.llama:build``."""

from __future__ import annotations

import json
from typing import Any

from meshwright_interop.huggingface.convert.family import Family, Options
from meshwright_interop.huggingface.convert.rope import read_rope, write_rope
from meshwright_interop.huggingface.convert.settings import (
    MAX_LAYERS,
    MAX_ROWS,
    MAX_WIDTH,
    Field,
    Settings,
    read_fields,
    write_fields,
)
from meshwright_interop.huggingface.convert.tables import decoder_rules

BUILDER = "meshwright_models.llama:build"
DENSE = {"moe": None, "mla": None}
"""Options of a decoder without experts and latent attention."""


COMMON = (
    Field("vocab_size", "vocab_size", maximum=MAX_ROWS),
    Field("hidden_size", "hidden_size", maximum=MAX_WIDTH),
    Field("num_hidden_layers", "num_layers", maximum=MAX_LAYERS),
    Field("num_attention_heads", "num_heads", maximum=MAX_WIDTH),
    Field(
        "num_key_value_heads",
        "num_kv_heads",
        default=lambda options: options["num_heads"],
        maximum=MAX_WIDTH,
    ),
    Field("intermediate_size", "ffn_size", maximum=MAX_WIDTH),
    Field("max_position_embeddings", "max_sequence_length"),
    Field("rms_norm_eps", "norm_eps", "positive", 1e-6),
    Field("tie_word_embeddings", "tied", "flag", False),
)
"""Fields that all decoders share."""


def read_common(
    settings: Settings,
    *,
    length: int,
    kv_heads: int | None = None,
    norm_eps: float = 1e-6,
    theta: float = 10_000.0,
) -> dict[str, Any]:
    """Convert the fields that all decoders share,
    with the defaults of transformers' config classes.

    Args:
        settings: the config.json.
        length: the class's default of ``max_position_embeddings``, in tokens.
        kv_heads: the class's default of ``num_key_value_heads``; None: the number of heads.
        norm_eps: the class's default of ``rms_norm_eps``.
        theta: the class's default of ``rope_theta``.
    """
    settings.must_be("hidden_act", "silu", "swish")
    settings.must_be("partial_rotary_factor", 1.0)
    settings.must_be("is_causal", True)
    defaults = {"max_position_embeddings": length, "rms_norm_eps": norm_eps}
    if kv_heads is not None and "num_key_value_heads" not in settings.fields:  # null is no default
        defaults["num_key_value_heads"] = kv_heads
    options = read_fields(settings, COMMON, **defaults)
    options |= {"dropout": 0.0, **read_rope(settings, theta)}
    if settings.real("attention_dropout", 0.0, maximum=1.0):
        settings.notes.append(
            f"{settings.place}: attention_dropout = {settings.fields['attention_dropout']} is not"
            " carried: training drops nothing (model.options.dropout)"
        )
    hidden, heads = options["hidden_size"], options["num_heads"]
    head_dim = settings.number("head_dim", max(1, hidden // heads), maximum=MAX_WIDTH)
    if head_dim * heads != hidden:
        options["head_dim"] = head_dim
    return options


def read_llama(settings: Settings) -> dict[str, Any]:
    """Convert a LlamaConfig to model.options."""
    options = read_common(settings, length=2048)
    options |= read_biases(settings)
    if settings.flag("mlp_bias", False):
        options["mlp_bias"] = True
    return options


def read_biases(settings: Settings) -> dict[str, Any]:
    """Convert ``attention_bias``, which stands for all four linears."""
    names = ("qkv_bias", "out_bias") if settings.flag("attention_bias", False) else ()
    return dict.fromkeys(names, True)


def read_mistral(settings: Settings) -> dict[str, Any]:
    """Convert a MistralConfig to model.options.

    A missing ``sliding_window`` is transformers' default of 4096 tokens, and null is none. A window
    has no effect on sequences that are no longer than it.
    """
    options = read_common(settings, length=4096 * 32, kv_heads=8)
    window = settings.get("sliding_window") if "sliding_window" in settings.fields else 4096
    if window is not None:
        options["sliding_window"] = settings.number("sliding_window", 4096)
    settings.must_be("layer_types", *layer_types(options["num_layers"], sliding=window is not None))
    return options


def layer_types(num_layers: int, *, sliding: bool) -> list[Any]:
    """Return the supported values of ``layer_types``: missing, or the same type for every layer."""
    kind = "sliding_attention" if sliding else "full_attention"
    return [None, [kind] * num_layers]


def read_qwen(settings: Settings) -> dict[str, Any]:
    """Convert the fields that Qwen2 and Qwen3 share.

    Only layers from ``max_window_layers`` on have a sliding window. All layers must be alike.
    """
    options = read_common(settings, length=32768, kv_heads=32)
    layers = options["num_layers"]
    if not settings.flag("use_sliding_window", False):
        settings.get("sliding_window")
        settings.must_be("layer_types", *layer_types(layers, sliding=False))
        return options
    if "sliding_window" in settings.fields and settings.get("sliding_window") is None:
        settings.must_be("layer_types", *layer_types(layers, sliding=False))
        return options
    first = settings.number("max_window_layers", 28, minimum=0)
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    types = settings.get("layer_types") or types
    if types == ["sliding_attention"] * layers:
        options["sliding_window"] = settings.number("sliding_window", 4096)
    elif types == ["full_attention"] * layers:
        settings.get("sliding_window")
    else:
        settings.problems.append(
            f"use_sliding_window with max_window_layers = {first}: some layers see a window and"
            " others all, which is not supported; set use_sliding_window to false for sequences no"
            " longer than sliding_window"
        )
    return options


def read_qwen2(settings: Settings) -> dict[str, Any]:
    """Convert a Qwen2Config to model.options. q, k and v always have biases;
    it has no field for them.
    """
    return read_qwen(settings) | {"qkv_bias": True}


def read_qwen3(settings: Settings) -> dict[str, Any]:
    """Convert a Qwen3Config to model.options."""
    options = read_qwen(settings) | {"qk_norm": True}
    if settings.fields.get("head_dim") is None:
        options["head_dim"] = 128
    options |= read_biases(settings)
    return options


def write_common(options: Options) -> dict[str, Any]:
    """Return the config.json fields of all four families,
    the rotary ones in the forms of transformers 4 and 5.
    """
    return write_fields(options, COMMON) | {
        "head_dim": options["head_dim"] or options["hidden_size"] // options["num_heads"],
        "hidden_act": "silu",
        **write_rope(options),
        "attention_dropout": 0.0,
    }


def write_llama(options: Options) -> dict[str, Any]:
    """Convert model.options to a LlamaConfig."""
    return write_common(options) | {
        "attention_bias": options["qkv_bias"],
        "mlp_bias": options["mlp_bias"],
    }


def write_mistral(options: Options) -> dict[str, Any]:
    """Convert model.options to a MistralConfig."""
    return write_common(options) | {"sliding_window": options["sliding_window"]}


def _write_qwen(options: Options) -> dict[str, Any]:
    window = options["sliding_window"]
    kind = "full_attention" if window is None else "sliding_attention"
    return write_common(options) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": options["num_layers"] if window is None else 0,
        "layer_types": [kind] * options["num_layers"],
    }


def write_qwen2(options: Options) -> dict[str, Any]:
    """Convert model.options to a Qwen2Config,
    with ``head_dim`` only if it is not hidden_size / num_heads.
    """
    usual = options["head_dim"] in (None, options["hidden_size"] // options["num_heads"])
    return {
        name: value
        for name, value in _write_qwen(options).items()
        if name != "head_dim" or not usual
    }


def write_qwen3(options: Options) -> dict[str, Any]:
    """Convert model.options to a Qwen3Config."""
    return _write_qwen(options) | {"attention_bias": options["qkv_bias"]}


def misfit(options: Options, **needed: Any) -> str | None:
    """Describe the first option that differs from the value ``needed`` by a family; None:
    all fit.
    """
    for name, value in needed.items():
        if options[name] != value:
            return f"model.options.{name} = {json.dumps(options[name])}"
    return None


def other_bias(options: Options) -> str | None:
    """Describe a model with only one of the two attention biases (qkv and out); None:
    both or neither.
    """
    if options["qkv_bias"] == options["out_bias"]:
        return None
    return (
        f"model.options.qkv_bias = {json.dumps(options['qkv_bias'])} and out_bias ="
        f" {json.dumps(options['out_bias'])}"
    )


def _uneven(options: Options) -> str | None:
    """Describe a hidden size that the number of heads does not divide; None: it does.

    LlamaConfig requires this even if ``head_dim`` is given.
    """
    hidden, heads = options["hidden_size"], options["num_heads"]
    return (
        f"model.options.hidden_size = {hidden} with num_heads = {heads}" if hidden % heads else None
    )


LEFT_OUT = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    BUILDER,
    read_llama,
    write_llama,
    lambda options: (
        misfit(options, **DENSE, qk_norm=False, sliding_window=None)
        or other_bias(options)
        or _uneven(options)
    ),
    decoder_rules,
    LEFT_OUT,
    "model.",
)
MISTRAL = LLAMA._replace(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=read_mistral,
    write=write_mistral,
    holds=lambda options: misfit(
        options, **DENSE, qk_norm=False, qkv_bias=False, out_bias=False, mlp_bias=False
    ),
)
QWEN2 = LLAMA._replace(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read_qwen2,
    write=write_qwen2,
    holds=lambda options: misfit(
        options, **DENSE, qk_norm=False, qkv_bias=True, out_bias=False, mlp_bias=False
    ),
)
QWEN3 = LLAMA._replace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read_qwen3,
    write=write_qwen3,
    holds=lambda options: (
        misfit(options, **DENSE, qk_norm=True, mlp_bias=False) or other_bias(options)
    ),
)
