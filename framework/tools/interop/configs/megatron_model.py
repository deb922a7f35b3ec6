"""Choice of the meshwright model that Megatron-LM's flags describe: Llama, GPT-2 or neither."""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.shell import PROGRAM
from meshwright.tools.interop.configs.translation import Draft, DropReason

OTHER = {
    "num-experts": "mixture of experts",
    "multi-latent-attention": "multi-latent attention",
    "mtp-num-layers": "multi-token prediction",
    "squared-relu": "squared ReLU",
    "qk-layernorm": "norms of q and k",
    "add-qkv-bias": "biases of q, k and v alone",
    "hybrid-override-pattern": "layers of several kinds",
    "heterogeneous-layers-config-path": "layers of several kinds",
    "apply-residual-connection-post-layernorm": "residuals from behind the norm",
    "rotary-seq-len-interpolation-factor": "interpolated positions",
    "window-size": "a sliding window",
    "relative-attention-num-buckets": "relative positions",
    "encoder-num-layers": "an encoder in Megatron-LM's form",
    "spec": "layers of its own",
}
"""Flags of models that neither builder supports -> the feature, for the error message."""
MOST_LAYERS = 100_000
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers that have only one version."""


def model(draft: Draft) -> int:
    """Translate the model to ``model.builder`` and its options, and return the number of layers.

    Raises:
        ConfigError: meshwright has no such model; names the flag.
    """
    program = draft.items.get(PROGRAM)
    if program is not None and re.search(r"pretrain_(?!gpt)\w+\.py$", program.key):
        raise draft.no_such_model(PROGRAM, f"what {program.key} trains, only pretrain_gpt.py's,")
    for name, what in OTHER.items():
        if draft.given(name):
            raise draft.no_such_model(name, what)
    missing = [f"--{name}" for name in ("num-layers", "hidden-size", "num-attention-heads") if not draft.given(name)]
    if missing:
        raise ConfigError(
            "MW-INTEROP-008",
            f"{' and '.join(missing)}: nowhere in the file: it is no list of Megatron-LM's flags, or not all of it",
        )
    layers = draft.count("num-layers", 1, most=MOST_LAYERS)
    hidden, heads = draft.count("hidden-size", 1), draft.count("num-attention-heads", 1)
    channels = draft.maybe_count("kv-channels")
    if channels is not None and channels * heads != hidden:
        raise draft.no_such_model("kv-channels", f"heads of {channels}, not {hidden} / {heads}")
    is_llama = _is_llama(draft)
    if is_llama:
        draft.put("model.builder", "meshwright.models.llama:build", "rotary positions, RMSNorm, SwiGLU, no biases")
    else:
        draft.put("model.builder", "meshwright.models.gpt2:build", "learned positions, LayerNorm, GELU, biases")
    draft.put("model.options.vocab_size", _vocabulary(draft, is_llama))
    draft.put("model.options.hidden_size", hidden)
    draft.put("model.options.num_layers", layers)
    draft.put("model.options.num_heads", heads)
    groups = draft.maybe_count("num-query-groups") or 1
    if draft.truth("group-query-attention"):
        if not is_llama:
            raise draft.no_such_model("group-query-attention", "GPT-2's layers and grouped queries")
        draft.put("model.options.num_kv_heads", groups)
    elif is_llama:
        draft.put("model.options.num_kv_heads", heads)
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if is_llama else 4 * hidden
    draft.put("model.options.ffn_size", draft.maybe_count("ffn-hidden-size") or usual)
    length = draft.maybe_count("max-position-embeddings") or draft.maybe_count("seq-length")
    if length is not None:
        draft.put("model.options.max_sequence_length", length)
    draft.put("model.options.norm_eps", draft.number("norm-epsilon", 1e-5))
    draft.put("model.options.tied", not draft.truth("untie-embeddings-and-output-weights"))
    _dropout(draft)
    if is_llama:
        _positions(draft)
    return layers


def _is_llama(draft: Draft) -> bool:
    """Return True for Llama (rotary positions, RMSNorm, SwiGLU, no biases), False for GPT-2 (none of these).

    Raises:
        ConfigError: the flags have only some of these, or other positions.
    """
    position = draft.text("position-embedding-type", "learned_absolute")
    norm = draft.text("normalization", "LayerNorm")
    rotary = draft.truth("use-rotary-position-embeddings") or position == "rope"
    if draft.truth("no-position-embedding") and not rotary:
        raise draft.no_such_model("no-position-embedding", "no positions")
    if not rotary and position != "learned_absolute":
        raise draft.no_such_model("position-embedding-type", f"positions of the kind {position}")
    traits = {
        "rotary positions": rotary,
        "RMSNorm": norm == "RMSNorm",
        "SwiGLU": draft.truth("swiglu"),
        "no biases": draft.truth("disable-bias-linear"),
    }
    draft.truth("openai-gelu")
    if len(set(traits.values())) > 1:
        has = [name for name, there in traits.items() if there]
        lacks = [name for name, there in traits.items() if not there]
        raise ConfigError(
            "MW-INTEROP-009",
            f"the flags have {', '.join(has)}, but not {', '.join(lacks)}: meshwright.models.llama has all of these "
            f"and meshwright.models.gpt2 none; bring one of your own with --model.builder=module:function and its "
            f"--model.options.*",
        )
    return rotary


def _vocabulary(draft: Draft, is_llama: bool) -> int:
    size = draft.maybe_count("vocab-size")
    if size is not None:
        return size
    kind = draft.text("tokenizer-type") or ("GPT2BPETokenizer" if draft.given("merge-file") else None)
    if kind in VOCABULARIES:
        draft.decide(f"model.options.vocab_size = {VOCABULARIES[kind]}: {kind}'s")
        return VOCABULARIES[kind]
    guess = 128256 if is_llama else 50257
    draft.decide(f"model.options.vocab_size = {guess}: to be said by hand: Megatron-LM asks the tokenizer, {kind}")
    if draft.given("tokenizer-type"):
        draft.leave("tokenizer-type", DropReason.BY_HAND, "model.options.vocab_size")
    return guess


def _dropout(draft: Draft) -> None:
    hidden, attention = draft.number("hidden-dropout", 0.1), draft.number("attention-dropout", 0.1)
    draft.put("model.options.dropout", hidden)
    if hidden != attention:
        draft.leave(
            "attention-dropout", DropReason.DIFFERS, f"one probability for all places: --hidden-dropout's {hidden}"
        )


def _positions(draft: Draft) -> None:
    percent = draft.number("rotary-percent")
    if percent not in (None, 1.0):
        raise draft.no_such_model("rotary-percent", "positions in a part of each head")
    draft.put("model.options.rope_theta", draft.number("rotary-base", 10000.0))
    if draft.truth("use-rope-scaling"):
        draft.put("model.options.rope_scaling_factor", draft.number("rope-scaling-factor", 8.0))
    if draft.truth("rotary-interleaved"):
        said = "halves are rotated, not neighbours: the same but for weights of elsewhere"
        draft.leave("rotary-interleaved", DropReason.DIFFERS, said)
