"""Choice of the meshwright model that Megatron-LM's flags describe: Llama, GPT-2 or neither."""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.shell import PROGRAM
from meshwright.tools.interop.configs.translation import HALVES, Draft, DropReason

OTHER = {
    "num-experts": "mixture of experts",
    "multi-latent-attention": "multi-latent attention",
    "mtp-num-layers": "multi-token prediction",
    "squared-relu": "squared ReLU",
    "hybrid-override-pattern": "layers of several kinds",
    "heterogeneous-layers-config-path": "layers of several kinds",
    "apply-residual-connection-post-layernorm": "residuals taken after the norm",
    "rotary-seq-len-interpolation-factor": "interpolated positions",
    "window-attn-skip-freq": "a sliding window in some layers only",
    "qk-l2-norm": "an L2 norm of q and k without weights",
    "relative-attention-num-buckets": "relative positions",
    "encoder-num-layers": "an encoder in Megatron-LM's form",
    "spec": "custom layers",
}
"""Flags of models that neither builder supports -> the feature, for the error message."""
MAX_LAYERS = 100_000
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers that have only one version."""


def model(draft: Draft) -> int:
    """Translate the model to ``model.builder`` and its options, and return the number of layers.

    Raises:
        ConfigError: meshwright has no such model; names the flag.
    """
    program = draft.items.get(PROGRAM)
    if program is not None and re.search(r"pretrain_(?!gpt)\w+\.py$", program.key):
        raise draft.unsupported_model(PROGRAM, f"the architecture of {program.key}, only that of pretrain_gpt.py,")
    for name, what in OTHER.items():
        if draft.has(name):
            raise draft.unsupported_model(name, what)
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
    draft.put("model.options.vocab_size", _vocabulary(draft, is_llama))
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
    _attention(draft, hidden, heads, is_llama=is_llama)
    if is_llama:
        _positions(draft)
    return layers


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


def _vocabulary(draft: Draft, is_llama: bool) -> int:
    size = draft.optional_count("vocab-size")
    if size is not None:
        return size
    kind = draft.text("tokenizer-type") or ("GPT2BPETokenizer" if draft.has("merge-file") else None)
    if kind in VOCABULARIES:
        draft.decide(f"model.options.vocab_size = {VOCABULARIES[kind]}: {kind}'s")
        return VOCABULARIES[kind]
    guess = 128256 if is_llama else 50257
    draft.decide(f"model.options.vocab_size = {guess}: set by hand: Megatron-LM takes it from the tokenizer, {kind}")
    if draft.has("tokenizer-type"):
        draft.drop("tokenizer-type", DropReason.BY_HAND, "model.options.vocab_size")
    return guess


def _dropout(draft: Draft) -> None:
    hidden, attention = draft.number("hidden-dropout", 0.1), draft.number("attention-dropout", 0.1)
    draft.put("model.options.dropout", hidden)
    if hidden != attention:
        draft.drop(
            "attention-dropout", DropReason.DIFFERS, f"one probability everywhere: that of --hidden-dropout, {hidden}"
        )


def _positions(draft: Draft) -> None:
    percent = draft.number("rotary-percent")
    if percent not in (None, 1.0):
        raise draft.unsupported_model("rotary-percent", "rotary positions in a part of each head")
    draft.put("model.options.rope_theta", draft.number("rotary-base", 10000.0))
    if draft.boolean("use-rope-scaling"):
        draft.put("model.options.rope_scaling_factor", draft.number("rope-scaling-factor", 8.0))
    if draft.boolean("rotary-interleaved"):
        draft.drop("rotary-interleaved", DropReason.DIFFERS, HALVES)
