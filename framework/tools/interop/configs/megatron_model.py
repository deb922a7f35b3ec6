"""Choice of the meshwright model that Megatron-LM's flags describe: Llama, GPT-2 or neither."""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.shell import PROGRAM
from meshwright.tools.interop.configs.source_keys import HALVES, MUP, DropReason, DropRule, is_off, is_variable
from meshwright.tools.interop.configs.translation import Draft

OTHER = {
    "num-experts": "mixture of experts",
    "multi-latent-attention": "multi-latent attention",
    "mtp-num-layers": "multi-token prediction",
    "squared-relu": "squared ReLU",
    "quick-geglu": "a GELU with gates",
    "hybrid-override-pattern": "layers of several kinds",
    "hybrid-layer-pattern": "layers of several kinds",
    "heterogeneous-layers-config-path": "layers of several kinds",
    "heterogeneous-layers-config-encoded-json": "layers of several kinds",
    "linear-attention-freq": "linear attention",
    "experimental-attention-variant": "another kind of attention",
    "attention-output-gate": "a gate after the attention",
    "softmax-scale": "another scale of the attention's softmax",
    "apply-residual-connection-post-layernorm": "residuals taken after the norm",
    "window-attn-skip-freq": "a sliding window in some layers only",
    "no-rope-freq": "layers without positions",
    "qk-l2-norm": "an L2 norm of q and k without weights",
    "qk-clip": "clipped logits of the attention",
    "glu-linear-offset": "an offset in its gates",
    "activation-func-clamp-value": "clamped activations",
    "enable-mhc-connections": "several residual streams",
    "relative-attention-num-buckets": "relative positions",
    "encoder-num-layers": "an encoder in Megatron-LM's form",
    "spec": "custom layers",
}
"""Flags of models that neither builder supports -> the feature, for the error message."""
MULTIMODAL = """
    language-model-type vision-* img-h img-w patch-dim pixel-shuffle max-num-tiles use-tiling use-thumbnail
    use-tile-tags freeze-lm freeze-vit freeze-LM freeze-ViT image-tag-type num-frames disable-vision-class-token
    add-class-token dataset-config prompt-path audio-* sound-* allow-missing-vision-projection-checkpoint
    decoder-seq-length
"""
"""Patterns of flags of vision and audio models."""
GPT_PROGRAM = re.compile(r"(pretrain|train|finetune|run)_?(gpt|llama|qwen|mistral)[\w.-]*\.py")
"""Programs whose model is described by Megatron-LM's flags alone."""
OTHER_PROGRAM = re.compile(r"moe|vl|vision|audio|mamba|hybrid", re.IGNORECASE)
"""Parts of the names of programs that train other models."""
MAX_LAYERS = 100_000
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers that have only one version."""


def model(draft: Draft) -> int | None:
    """Translate the model to ``model.builder`` and its options, and return the number of layers; None: not known.

    Raises:
        ConfigError: meshwright has no such model; names the flag.
    """
    _refuse_others(draft)
    missing = [f"--{name}" for name in ("num-layers", "hidden-size", "num-attention-heads") if not draft.has(name)]
    if missing:
        raise ConfigError(
            "MW-INTEROP-008",
            f"{' and '.join(missing)}: not in the file: it does not hold Megatron-LM's flags, or not all of them",
        )
    layers = draft.count("num-layers", 1, maximum=MAX_LAYERS)
    hidden, heads = draft.count("hidden-size", 1), draft.count("num-attention-heads", 1)
    is_llama = _is_llama(draft)
    if is_llama:
        draft.put("model.builder", "meshwright.models.llama:build", "rotary positions, RMSNorm, SwiGLU, no biases")
    else:
        draft.put("model.builder", "meshwright.models.gpt2:build", "learned positions, LayerNorm, GELU, biases")
    _vocabulary(draft, is_llama)
    draft.put("model.options.hidden_size", hidden)
    draft.put("model.options.num_layers", layers)
    draft.put("model.options.num_heads", heads)
    groups = draft.optional_count("num-query-groups") or 1
    if draft.boolean("group-query-attention"):
        if not is_llama:
            raise draft.unsupported_model("group-query-attention", "GPT-2 layers and grouped-query attention")
        draft.put("model.options.num_kv_heads", groups)
    elif is_llama:
        draft.put("model.options.num_kv_heads", heads)
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if is_llama else 4 * hidden
    draft.put("model.options.ffn_size", draft.optional_count("ffn-hidden-size") or usual)
    length = draft.optional_count("max-position-embeddings") or draft.optional_count("seq-length")
    draft.put("model.options.max_sequence_length", length)
    draft.put("model.options.norm_eps", draft.number("norm-epsilon", 1e-5))
    draft.put("model.options.tied", not draft.boolean("untie-embeddings-and-output-weights"))
    _dropout(draft)
    std = draft.number("init-method-std", 0.02)
    draft.put("model.options.init_std", None if std == 0.02 else std)
    _attention(draft, hidden, heads, is_llama=is_llama)
    if is_llama:
        _positions(draft)
    _follow_unset(draft, is_llama=is_llama)
    return None if "num-layers" in draft.unset else layers


def _follow_unset(draft: Draft, *, is_llama: bool) -> None:
    """Leave the options open whose default follows from a flag with an undefined variable."""
    follows = {
        "hidden-size": ("ffn-hidden-size", "ffn_size"),
        "seq-length": ("max-position-embeddings", "max_sequence_length"),
        **({"num-attention-heads": ("num-query-groups", "num_kv_heads")} if is_llama else {}),
    }
    for flag, (own, option) in follows.items():
        if flag in draft.unset and not draft.has(own):
            draft.leave_open(f"model.options.{option}", 1, draft.why_missing(flag))


def _attention(draft: Draft, hidden: int, heads: int, *, is_llama: bool) -> None:
    """Translate the flags of the attention beyond its head counts: options of Llama, which GPT-2 lacks.

    Megatron-LM's norm of q and k is of the kind of ``--normalization`` with ``--norm-epsilon``, over one head, as here.
    """
    channels = draft.optional_count("kv-channels")
    if channels is not None and channels * heads != hidden:
        if not is_llama:
            raise draft.unsupported_model(
                "kv-channels", f"GPT-2 layers and head size {channels}, not {hidden} / {heads}"
            )
        draft.put("model.options.head_dim", channels)
    if draft.boolean("qk-layernorm"):
        if not is_llama:
            raise draft.unsupported_model("qk-layernorm", "GPT-2 layers and norms of q and k")
        draft.put("model.options.qk_norm", True, "--qk-layernorm, an RMSNorm as --normalization says")
    if draft.boolean("add-qkv-bias") and is_llama:
        draft.put("model.options.qkv_bias", True)
    window = _window(draft)
    if window is not None:
        if not is_llama:
            raise draft.unsupported_model("window-size", "GPT-2 layers and a sliding window")
        draft.put("model.options.sliding_window", window, "--window-size counts the tokens before, and not itself")


def _window(draft: Draft) -> int | None:
    """Return the number of tokens that a token attends to, itself included; None: all before it.

    Raises:
        ConfigError: the window is not one of tokens before.
    """
    written = draft.value("window-size")
    if written is None:
        return None
    numbers = re.findall(r"-?\d+", str(written))
    if len(numbers) != 2 or int(numbers[1]) not in (0, -1) or int(numbers[0]) < -1:
        raise draft.unsupported_model("window-size", "a sliding window other than (tokens before, 0)")
    return None if numbers[0] == "-1" else int(numbers[0]) + 1


def _is_llama(draft: Draft) -> bool:
    """Return True for Llama (rotary positions, RMSNorm, SwiGLU, no biases), False for GPT-2 (none of these).

    Raises:
        ConfigError: the flags have only some of these, or other positions.
    """
    position = draft.text("position-embedding-type", "learned_absolute")
    norm = draft.text("normalization", "LayerNorm")
    rotary = draft.boolean("use-rotary-position-embeddings") or position == "rope"
    if draft.boolean("no-position-embedding") and not rotary:
        raise draft.unsupported_model("no-position-embedding", "no position embedding")
    if not rotary and position != "learned_absolute":
        raise draft.unsupported_model("position-embedding-type", f"position embedding {position}")
    traits = {
        "rotary positions": rotary,
        "RMSNorm": norm == "RMSNorm",
        "SwiGLU": draft.boolean("swiglu"),
        "no biases": draft.boolean("disable-bias-linear"),
    }
    draft.boolean("openai-gelu")
    if len(set(traits.values())) > 1:
        has = [name for name, is_set in traits.items() if is_set]
        lacks = [name for name, is_set in traits.items() if not is_set]
        raise ConfigError(
            "MW-INTEROP-009",
            f"the flags have {', '.join(has)}, but not {', '.join(lacks)}: meshwright.models.llama has all of these "
            f"and meshwright.models.gpt2 none; provide one with --model.builder=module:function and its "
            f"--model.options.*",
        )
    return rotary


def _vocabulary(draft: Draft, is_llama: bool) -> None:
    """Translate the vocabulary: in the file, of a tokenizer with one version, or left open."""
    size = draft.optional_count("vocab-size")
    kind = draft.text("tokenizer-type") or ("GPT2BPETokenizer" if draft.has("merge-file") else None)
    if size is not None:
        draft.put("model.options.vocab_size", size)
    elif kind in VOCABULARIES:
        draft.put("model.options.vocab_size", VOCABULARIES[kind], f"{kind}'s")
    else:
        reason = (
            f"{draft.why_missing('vocab-size')}; Megatron-LM takes it from its tokenizer{f', {kind}' if kind else ''}"
        )
        draft.leave_open("model.options.vocab_size", 128256 if is_llama else 50257, reason)
        draft.drop("tokenizer-type", DropReason.BY_HAND, "model.options.vocab_size")


def _refuse_others(draft: Draft) -> None:
    """Refuse the flags of models that no builder here makes: experts, vision and audio, layers of several kinds.

    Raises:
        ConfigError: the script starts the training of another model.
    """
    program = draft.items.get(PROGRAM)
    several = DropRule(MULTIMODAL, DropReason.NONE)
    multimodal = next(
        (name for name in draft.items if several.matches(name) and not is_off(draft.items[name].value)), None
    )
    if multimodal is not None:
        raise draft.unsupported_model(multimodal, "images, sound or several encoders")
    name = "" if program is None else program.key.rpartition("/")[2]
    is_other = GPT_PROGRAM.fullmatch(name) is None or OTHER_PROGRAM.search(name) is not None
    if name and is_other and not is_variable(name):
        raise draft.unsupported_model(
            PROGRAM, f"the architecture of {name}, whose code may add to the flags; only that of pretrain_gpt.py,"
        )
    for name, what in OTHER.items():
        if draft.has(name) and not is_off(draft.value(name)) and str(draft.value(name)) not in ("0", "False", "false"):
            draft.refused.append(draft.unsupported_model(name, what))
    if draft.number("rotary-seq-len-interpolation-factor", 1.0) != 1.0:
        draft.refused.append(draft.unsupported_model("rotary-seq-len-interpolation-factor", "interpolated positions"))
    if draft.boolean("use-mup"):
        draft.refuse("use-mup", MUP, final=True)
    draft.skip("mup-*")  # without effect unless --use-mup is set


def _dropout(draft: Draft) -> None:
    hidden, attention = draft.number("hidden-dropout", 0.1), draft.number("attention-dropout", 0.1)
    draft.put("model.options.dropout", hidden)
    if hidden != attention:
        draft.refuse("attention-dropout", f"one probability everywhere here: that of --hidden-dropout, {hidden}")


def _positions(draft: Draft) -> None:
    percent = draft.number("rotary-percent")
    if percent not in (None, 1.0):
        raise draft.unsupported_model("rotary-percent", "rotary positions in a part of each head")
    draft.put("model.options.rope_theta", draft.number("rotary-base", 10000.0))
    if draft.boolean("use-rope-scaling"):
        draft.put("model.options.rope_scaling_factor", draft.number("rope-scaling-factor", 8.0))
    if draft.boolean("rotary-interleaved"):
        draft.drop("rotary-interleaved", DropReason.DIFFERS, HALVES)
