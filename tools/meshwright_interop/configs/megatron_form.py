"""Form of the decoder that Megatron-LM's flags describe: norm, positions, activation and biases.

A form that is GPT-2's or Llama's in every part goes to that builder, any other to ``meshwright_models.decoder``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright_interop.configs.translation import Translation

NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
WORDS = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "learned": "learned positions",
    "rotary": "rotary positions",
    "none": "no positions",
    "gelu": "exact GELU",
    "gelu_tanh": "GELU",
    "squared_relu": "squared ReLU",
    "swiglu": "SwiGLU",
}
GATED = "swiglu"


class DecoderForm(NamedTuple):
    """Builder for the decoder that the flags describe, and the options that differ from the builder's defaults."""

    builder: str
    """``gpt2``, ``llama`` or ``decoder``."""
    traits: str
    """For the report: "rotary positions, RMSNorm, SwiGLU, no biases"."""
    options: dict[str, Any]
    is_rotary: bool
    is_gated: bool


def form_of(translation: Translation) -> DecoderForm:
    """Read the flags of the form.

    Raises:
        ConfigError: no model here has such positions, or such a norm.
    """
    norm, positions, mlp = _norm(translation), _positions(translation), _activation(translation)
    has_bias = not translation.boolean("disable-bias-linear")
    traits = ", ".join((WORDS[positions], WORDS[norm], WORDS[mlp], "biases" if has_bias else "no biases"))
    is_rotary, is_gated = positions == "rotary", mlp == GATED
    beyond = _beyond(translation)
    if (norm, positions, mlp, has_bias) == ("rms_norm", "rotary", "swiglu", False) and not beyond["llama"]:
        return DecoderForm("llama", traits, {}, is_rotary, is_gated)
    if (norm, positions, mlp, has_bias) == ("layer_norm", "learned", "gelu_tanh", True) and not beyond["gpt2"]:
        return DecoderForm("gpt2", traits, {}, is_rotary, is_gated)
    qkv_bias = has_bias or translation.boolean("add-qkv-bias")
    options = {"norm": norm, "positions": positions, "mlp": mlp}
    biases = {"qkv_bias": qkv_bias, "out_bias": has_bias, "mlp_bias": has_bias}
    return DecoderForm(
        "decoder", traits, options | {name: True for name, is_set in biases.items() if is_set}, is_rotary, is_gated
    )


def _beyond(translation: Translation) -> dict[str, bool]:
    """Return, for "llama" and "gpt2", whether the flags need an option that only ``decoder`` has."""
    dropouts = translation.number("hidden-dropout", 0.1) != translation.number("attention-dropout", 0.1)
    rotary = any(
        translation.number(name) not in (None, 1.0)
        for name in ("rotary-percent", "rotary-seq-len-interpolation-factor")
    )
    hidden, heads = translation.count("hidden-size", 1), translation.count("num-attention-heads", 1)
    channels = translation.optional_count("kv-channels")
    own_attention = (
        translation.boolean("group-query-attention")
        or translation.boolean("qk-layernorm")
        or translation.value("window-size") is not None
        or (channels is not None and channels * heads != hidden)
    )
    return {"llama": dropouts or rotary, "gpt2": dropouts or own_attention}


def _norm(translation: Translation) -> str:
    norm = translation.text("normalization", "LayerNorm") or ""
    if norm not in NORMS:
        raise translation.unsupported_model("normalization", f"the norm {norm}")
    return NORMS[norm]


def _positions(translation: Translation) -> str:
    position = translation.text("position-embedding-type", "learned_absolute") or ""
    if translation.boolean("use-rotary-position-embeddings"):
        position = "rope"
    if translation.boolean("no-position-embedding") and position == "learned_absolute":
        position = "none"
    if position not in POSITIONS:
        raise translation.unsupported_model("position-embedding-type", f"position embedding {position}")
    return POSITIONS[position]


def _activation(translation: Translation) -> str:
    """Return the value of ``mlp``.

    A GELU is the tanh approximation where Megatron-LM fuses it with a bias, or with ``--openai-gelu``; else exact.
    """
    if translation.boolean("swiglu"):
        return GATED
    if translation.boolean("squared-relu"):
        return "squared_relu"
    is_fused = not translation.boolean("disable-bias-linear") and not translation.boolean("no-bias-gelu-fusion")
    return "gelu_tanh" if translation.boolean("openai-gelu") or is_fused else "gelu"
