"""Choice of the meshwright builder for the model that Megatron-LM's flags describe: llama, gpt2, decoder, or none."""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.megatron_form import DecoderForm, form_of
from meshwright.tools.interop.configs.megatron_mup import mup
from meshwright.tools.interop.configs.megatron_others import refuse_others
from meshwright.tools.interop.configs.source_keys import HALVES, DropReason, is_off
from meshwright.tools.interop.configs.translation import Draft

MAX_LAYERS = 100_000
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers that have only one version."""


def model(draft: Draft) -> int | None:
    """Translate the model to ``model.builder`` and its options, and return the number of layers; None: not known.

    Raises:
        ConfigError: meshwright has no such model; names the flag.
    """
    refuse_others(draft)
    missing = [f"--{name}" for name in ("num-layers", "hidden-size", "num-attention-heads") if not draft.has(name)]
    if missing:
        raise ConfigError(
            "MW-INTEROP-008",
            f"{' and '.join(missing)}: required by Megatron-LM, not in the file: give a file with all flags of the run",
        )
    layers = draft.count("num-layers", 1, maximum=MAX_LAYERS)
    hidden, heads = draft.count("hidden-size", 1), draft.count("num-attention-heads", 1)
    form = form_of(draft)
    is_llama = form.builder == "llama"
    draft.put("model.builder", f"meshwright.models.{form.builder}:build", form.traits)
    for option, value in form.options.items():
        draft.put(f"model.options.{option}", value)
    _vocabulary(draft, form)
    draft.put("model.options.hidden_size", hidden)
    draft.put("model.options.num_layers", layers)
    draft.put("model.options.num_heads", heads)
    groups = draft.optional_count("num-query-groups") or 1
    if draft.boolean("group-query-attention"):
        draft.put("model.options.num_kv_heads", groups)
    elif is_llama:
        draft.put("model.options.num_kv_heads", heads)
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if form.is_gated else 4 * hidden
    draft.put("model.options.ffn_size", draft.optional_count("ffn-hidden-size") or usual)
    length = draft.optional_count("max-position-embeddings") or draft.optional_count("seq-length")
    draft.put("model.options.max_sequence_length", length)
    draft.put("model.options.norm_eps", draft.number("norm-epsilon", 1e-5))
    draft.put("model.options.tied", not draft.boolean("untie-embeddings-and-output-weights"))
    _dropout(draft, form)
    std = draft.number("init-method-std", 0.02)
    draft.put("model.options.init_std", None if std == 0.02 else std)
    _attention(draft, hidden, heads)
    _multi_token(draft, form)
    mup(draft, hidden, heads)
    if form.is_rotary:
        _positions(draft)
    _follow_unset(draft, is_llama=is_llama)
    return None if "num-layers" in draft.unset else layers


def _follow_unset(draft: Draft, *, is_llama: bool) -> None:
    """Leave open the options whose default follows from a flag with an undefined variable."""
    follows = {
        "hidden-size": ("ffn-hidden-size", "ffn_size"),
        "seq-length": ("max-position-embeddings", "max_sequence_length"),
        **({"num-attention-heads": ("num-query-groups", "num_kv_heads")} if is_llama else {}),
    }
    for flag, (own, option) in follows.items():
        if flag in draft.unset and not draft.has(own):
            draft.leave_open(f"model.options.{option}", 1, draft.why_missing(flag))


def _attention(draft: Draft, hidden: int, heads: int) -> None:
    """Translate the flags of the attention beyond its head counts: options of Llama and the decoder.

    Megatron-LM's norm of q and k is of the kind of ``--normalization`` with ``--norm-epsilon``, over one head, as here.
    """
    channels = draft.optional_count("kv-channels")
    if channels is not None and channels * heads != hidden:
        draft.put("model.options.head_dim", channels)
    if draft.boolean("qk-layernorm"):
        draft.put("model.options.qk_norm", True, "--qk-layernorm, a norm as --normalization says")
    if draft.boolean("add-qkv-bias") and draft.tree["model.builder"] == "meshwright.models.llama:build":
        draft.put("model.options.qkv_bias", True)
    window = _window(draft)
    if window is not None:
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


def _vocabulary(draft: Draft, form: DecoderForm) -> None:
    """Translate the vocabulary: in the file, of a tokenizer with one version, or left open.

    The NullTokenizer of Megatron-Bridge counts its end of document in.
    """
    size = draft.optional_count("vocab-size")
    kind = draft.text("tokenizer-type") or ("GPT2BPETokenizer" if draft.has("merge-file") else None)
    if size is not None and kind == "NullTokenizer" and draft.framework == "Megatron-LM":
        why = "--vocab-size and NullTokenizer's end of document; from megatron-core 0.18 on it is --vocab-size alone"
        draft.put("model.options.vocab_size", size + 1, why)
    elif size is not None:
        draft.put("model.options.vocab_size", size)
    elif kind in VOCABULARIES:
        draft.put("model.options.vocab_size", VOCABULARIES[kind], f"{kind}'s")
    else:
        reason = (
            f"{draft.why_missing('vocab-size')}; Megatron-LM takes it from its tokenizer{f', {kind}' if kind else ''}"
        )
        draft.leave_open("model.options.vocab_size", 128256 if form.builder == "llama" else 50257, reason)
        draft.drop("tokenizer-type", DropReason.BY_HAND, "model.options.vocab_size")


def _dropout(draft: Draft, form: DecoderForm) -> None:
    hidden, attention = draft.number("hidden-dropout", 0.1), draft.number("attention-dropout", 0.1)
    draft.put("model.options.dropout", hidden)
    if hidden != attention:
        assert form.builder == "decoder", form
        draft.put("model.options.attention_dropout", attention)


def _multi_token(draft: Draft, form: DecoderForm) -> None:
    """Translate multi-token prediction. Its modules have rotary positions or none, in Megatron-LM as here."""
    draft.skip("mtp-loss-scaling-factor")
    if is_off(draft.value("mtp-num-layers")) or draft.value("mtp-num-layers") == "0":
        return
    if form.builder == "gpt2" or form.options.get("positions") == "learned":
        draft.refused.append(draft.unsupported_model("mtp-num-layers", "multi-token prediction and learned positions"))
        return
    draft.put("model.options.mtp_layers", draft.optional_count("mtp-num-layers"))
    why = "the modules' losses too are divided by the labels of the next token, as with --calculate-per-token-loss"
    draft.put("model.options.mtp_loss_weight", draft.number("mtp-loss-scaling-factor", 0.1, minimum=0.0), why)


def _positions(draft: Draft) -> None:
    """Translate rotary positions. A part of each head, and interpolation, are options of the decoder alone."""
    draft.put("model.options.rope_theta", draft.number("rotary-base", 10000.0))
    percent, factor = draft.number("rotary-percent"), draft.number("rotary-seq-len-interpolation-factor")
    draft.put("model.options.rotary_share", None if percent == 1 else percent)
    draft.put("model.options.rope_interpolation", None if factor == 1 else factor)
    if draft.boolean("use-rope-scaling"):
        draft.put("model.options.rope_scaling_factor", draft.number("rope-scaling-factor", 8.0))
    if draft.boolean("rotary-interleaved"):
        draft.drop("rotary-interleaved", DropReason.DIFFERS, HALVES)
