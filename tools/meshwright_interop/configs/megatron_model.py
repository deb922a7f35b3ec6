"""Choice of the meshwright builder for the model that Megatron-LM's flags describe: llama, gpt2, decoder, or none."""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright.system.numbers import whole_number
from meshwright_interop.configs.megatron_form import DecoderForm, form_of
from meshwright_interop.configs.megatron_mup import mup
from meshwright_interop.configs.megatron_others import refuse_others
from meshwright_interop.configs.source_keys import HALVES, DropReason, is_off
from meshwright_interop.configs.translation import Translation

MAX_LAYERS = 100_000
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers that have only one version."""


def model(translation: Translation) -> int:
    """Translate the model to ``model.builder`` and its options, and return the number of layers.

    Raises:
        ConfigError: meshwright has no such model; names the flag.
    """
    refuse_others(translation)
    missing = [
        f"--{name}" for name in ("num-layers", "hidden-size", "num-attention-heads") if not translation.has(name)
    ]
    if missing:
        raise ConfigError(
            "MW-INTEROP-008",
            f"{' and '.join(missing)}: required by Megatron-LM, not in the file: give a file with all flags of the run",
        )
    layers = translation.count("num-layers", 1, maximum=MAX_LAYERS)
    hidden, heads = translation.count("hidden-size", 1), translation.count("num-attention-heads", 1)
    form = form_of(translation)
    is_llama = form.builder == "llama"
    translation.put("model.builder", f"meshwright_models.{form.builder}:build", form.traits)
    for option, value in form.options.items():
        translation.put(f"model.options.{option}", value)
    _vocabulary(translation, form)
    translation.put("model.options.hidden_size", hidden)
    translation.put("model.options.num_layers", layers)
    translation.put("model.options.num_heads", heads)
    groups = translation.optional_count("num-query-groups") or 1
    if translation.boolean("group-query-attention"):
        translation.put("model.options.num_kv_heads", groups)
    elif is_llama:
        translation.put("model.options.num_kv_heads", heads)
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if form.is_gated else 4 * hidden
    translation.put("model.options.ffn_size", translation.optional_count("ffn-hidden-size") or usual)
    length = translation.optional_count("max-position-embeddings") or translation.optional_count("seq-length")
    translation.put("model.options.max_sequence_length", length)
    translation.put("model.options.norm_eps", translation.number("norm-epsilon", 1e-5))
    translation.put("model.options.tied", not translation.boolean("untie-embeddings-and-output-weights"))
    _dropout(translation, form)
    std = translation.number("init-method-std", 0.02)
    translation.put("model.options.init_std", None if std == 0.02 else std)
    _attention(translation, hidden, heads)
    _multi_token(translation, form)
    mup(translation, hidden, heads)
    if form.is_rotary:
        _positions(translation)
    return layers


def _attention(translation: Translation, hidden: int, heads: int) -> None:
    """Translate the flags of the attention beyond its head counts: options of Llama and the decoder.

    Megatron-LM's norm of q and k is of the kind of ``--normalization`` with ``--norm-epsilon``, over one head, as here.
    """
    channels = translation.optional_count("kv-channels")
    if channels is not None and channels * heads != hidden:
        translation.put("model.options.head_dim", channels)
    if translation.boolean("qk-layernorm"):
        translation.put("model.options.qk_norm", True, "--qk-layernorm, a norm as --normalization says")
    if translation.boolean("add-qkv-bias") and translation.tree["model.builder"] == "meshwright_models.llama:build":
        translation.put("model.options.qkv_bias", True)
    window = _window(translation)
    if window is not None:
        translation.put(
            "model.options.sliding_window", window, "--window-size counts the tokens before, and not itself"
        )


def _window(translation: Translation) -> int | None:
    """Return the number of tokens that a token attends to, itself included; None: all before it.

    Raises:
        ConfigError: the window is not one of tokens before.
    """
    written = translation.value("window-size")
    if written is None:
        return None
    numbers = [whole_number(word, -1) for word in re.findall(r"-?\d+", str(written))]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] not in (0, -1):
        raise translation.unsupported_model("window-size", "a sliding window other than (tokens before, 0)")
    return None if numbers[0] == -1 else numbers[0] + 1


def _vocabulary(translation: Translation, form: DecoderForm) -> None:
    """Translate the vocabulary: in the file, of a tokenizer with one version, or left open.

    The NullTokenizer of Megatron-Bridge counts its end of document in.
    """
    size = translation.optional_count("vocab-size")
    kind = translation.text("tokenizer-type") or ("GPT2BPETokenizer" if translation.has("merge-file") else None)
    if size is not None and kind == "NullTokenizer" and translation.framework == "Megatron-LM":
        why = "--vocab-size and NullTokenizer's end of document; from megatron-core 0.18 on it is --vocab-size alone"
        translation.put("model.options.vocab_size", size + 1, why)
    elif size is not None:
        translation.put("model.options.vocab_size", size)
    elif kind in VOCABULARIES:
        translation.put("model.options.vocab_size", VOCABULARIES[kind], f"{kind}'s")
    else:
        of_kind = f", {kind}" if kind else ""
        reason = f"{translation.why_missing('vocab-size')}; Megatron-LM takes it from its tokenizer{of_kind}"
        translation.leave_open("model.options.vocab_size", 128256 if form.builder == "llama" else 50257, reason)
        translation.drop("tokenizer-type", DropReason.BY_HAND, "model.options.vocab_size")


def _dropout(translation: Translation, form: DecoderForm) -> None:
    hidden, attention = translation.number("hidden-dropout", 0.1), translation.number("attention-dropout", 0.1)
    translation.put("model.options.dropout", hidden)
    if hidden != attention:
        assert form.builder == "decoder", form
        translation.put("model.options.attention_dropout", attention)


def _multi_token(translation: Translation, form: DecoderForm) -> None:
    """Translate multi-token prediction. Its modules have rotary positions or none, in Megatron-LM as here."""
    translation.skip("mtp-loss-scaling-factor")
    if is_off(translation.value("mtp-num-layers")) or translation.value("mtp-num-layers") == "0":
        return
    if form.builder == "gpt2" or form.options.get("positions") == "learned":
        translation.refused.append(
            translation.unsupported_model("mtp-num-layers", "multi-token prediction and learned positions")
        )
        return
    translation.put("model.options.mtp_layers", translation.optional_count("mtp-num-layers"))
    why = "the modules' losses too are divided by the labels of the next token, as with --calculate-per-token-loss"
    translation.put(
        "model.options.mtp_loss_weight", translation.number("mtp-loss-scaling-factor", 0.1, minimum=0.0), why
    )


def _positions(translation: Translation) -> None:
    """Translate rotary positions. A part of each head, and interpolation, are options of the decoder alone."""
    translation.put("model.options.rope_theta", translation.number("rotary-base", 10000.0))
    percent, factor = translation.number("rotary-percent"), translation.number("rotary-seq-len-interpolation-factor")
    translation.put("model.options.rotary_share", None if percent == 1 else percent)
    translation.put("model.options.rope_interpolation", None if factor == 1 else factor)
    if translation.boolean("use-rope-scaling"):
        translation.put("model.options.rope_scaling_factor", translation.number("rope-scaling-factor", 8.0))
    if translation.boolean("rotary-interleaved"):
        translation.drop("rotary-interleaved", DropReason.DIFFERS, HALVES)
