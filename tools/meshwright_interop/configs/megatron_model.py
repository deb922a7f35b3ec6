"""Choice of the meshwright builder for the model that Megatron-LM's flags describe: one that is
GPT-2's or Llama's in every part goes to that builder, any other to ``meshwright_models.decoder``.
"""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright.system.numbers import whole_number
from meshwright_interop.configs.flags import PROGRAM
from meshwright_interop.configs.megatron_tables import MODEL, ROTARY
from meshwright_interop.configs.source_keys import DropReason
from meshwright_interop.configs.translation import Translation

MAX_LAYERS = 100_000
REQUIRED = ("num-layers", "hidden-size", "num-attention-heads")
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers that have only one version."""
NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
BUILDERS = {
    ("rms_norm", "rotary", "swiglu", False): "llama",
    ("layer_norm", "learned", "gelu_tanh", True): "gpt2",
}
"""(norm, positions, MLP, has biases) -> builder of exactly this form."""
GPT_PROGRAM = re.compile(r"(pretrain|train|finetune|run)_?(gpt|llama|qwen|mistral)[\w.-]*\.py")
"""Programs whose model is described by Megatron-LM's flags alone."""
OTHER_PROGRAM = re.compile(r"moe|vl|vision|audio|mamba|hybrid", re.IGNORECASE)
"""Parts of the names of programs that train other models."""
SENTENCES = re.compile(r"_sentence(?![\w.])")
"""Suffix of a corpus that was split into sentences, which only BERT reads."""


def model(translation: Translation) -> int:
    """Translate the model to ``model.builder`` and its options, and return the number of layers.

    Raises:
        ConfigError: meshwright has no such model; names the flag.
    """
    if translation.own_model:
        return translation.count("num-layers", 1, maximum=MAX_LAYERS)
    _check_program(translation)
    missing = [f"--{name}" for name in REQUIRED if not translation.has(name)]
    if missing:
        raise ConfigError(
            "MW-INTEROP-008",
            f"{' and '.join(missing)}: required by Megatron-LM, not in the file: give a file with"
            " all flags of the run",
        )
    layers = translation.count("num-layers", 1, maximum=MAX_LAYERS)
    builder = _form(translation)
    _vocabulary(translation, 128256 if builder == "llama" else 50257)
    translation.put_rows(MODEL)
    _sizes(translation, builder)
    _window(translation)
    _multi_token(translation, builder)
    return layers


def _check_program(translation: Translation) -> None:
    """Check that the program and the corpus are those of a GPT: code may override the flags, and
    most flags of BERT's training are also a GPT's.
    """
    program = translation.items.get(PROGRAM)
    name = "" if program is None else program.key.rpartition("/")[2]
    if name and (GPT_PROGRAM.fullmatch(name) is None or OTHER_PROGRAM.search(name)):
        what = f"the architecture of {name} (only pretrain_gpt.py is read)"
        raise translation.unsupported_model(PROGRAM, what)
    bert = {"data-path": SENTENCES, "tokenizer-type": re.compile("^BertWordPiece")}
    for flag, pattern in bert.items():
        if translation.has(flag) and pattern.search(str(translation.items[flag].value)):
            raise translation.unsupported_model(flag, "the training of BERT")


def _form(translation: Translation) -> str:
    """Translate norm, positions, activation and biases, and return the name of the builder."""
    norm, positions = _norm(translation), _positions(translation)
    mlp, has_bias = _activation(translation), not translation.boolean("disable-bias-linear")
    builder = BUILDERS.get((norm, positions, mlp, has_bias), "decoder")
    if builder in _too_narrow(translation):
        builder = "decoder"
    biases = "biases" if has_bias else "no biases"
    traits = f"{positions} positions, {norm}, {mlp}, {biases}"
    translation.put("model.builder", f"meshwright_models.{builder}:build", traits)
    qkv_bias = translation.boolean("add-qkv-bias")
    if builder == "decoder":
        for option, value in (("norm", norm), ("positions", positions), ("mlp", mlp)):
            translation.put(f"model.options.{option}", value)
        for option in ("out_bias", "mlp_bias"):
            translation.put(f"model.options.{option}", True if has_bias else None)
    if builder != "gpt2" and (qkv_bias or has_bias):
        translation.put("model.options.qkv_bias", True)
    if positions == "rotary":
        translation.put_rows(ROTARY)
        if translation.boolean("use-rope-scaling"):
            factor = translation.number("rope-scaling-factor", 8.0)
            translation.put("model.options.rope_scaling_factor", factor)
    return builder


def _norm(translation: Translation) -> str:
    norm = translation.text("normalization", "LayerNorm")
    if norm not in NORMS:
        raise translation.unsupported_model("normalization", f"the norm {norm}")
    return NORMS[norm]


def _positions(translation: Translation) -> str:
    position = translation.text("position-embedding-type", "learned_absolute")
    if translation.boolean("use-rotary-position-embeddings"):
        position = "rope"
    if translation.boolean("no-position-embedding") and position == "learned_absolute":
        position = "none"
    if position not in POSITIONS:
        what = f"position embedding {position}"
        raise translation.unsupported_model("position-embedding-type", what)
    return POSITIONS[position]


def _activation(translation: Translation) -> str:
    """Return the value of ``mlp``.

    A GELU is the tanh approximation where Megatron-LM fuses it with a bias, or with
    ``--openai-gelu``; else exact.
    """
    if translation.boolean("swiglu"):
        return "swiglu"
    if translation.boolean("squared-relu"):
        return "squared_relu"
    has_bias = not translation.boolean("disable-bias-linear")
    is_fused = has_bias and not translation.boolean("no-bias-gelu-fusion")
    return "gelu_tanh" if translation.boolean("openai-gelu") or is_fused else "gelu"


def _too_narrow(translation: Translation) -> set[str]:
    """Return the builders that lack an option of the flags: only ``decoder`` has them all."""
    hidden_dropout = translation.number("hidden-dropout", 0.1)
    if translation.number("attention-dropout", 0.1) != hidden_dropout:
        return {"llama", "gpt2"}
    partial = (translation.number("rotary-percent"), translation.number(ROTARY[2].key))
    if any(value not in (None, 1.0) for value in partial):
        return {"llama"}
    of_attention = (
        translation.boolean("group-query-attention"),
        translation.boolean("qk-layernorm"),
        translation.value("window-size") is not None,
        _head_dim(translation) is not None,
    )
    return {"gpt2"} if any(of_attention) else set()


def _head_dim(translation: Translation) -> int | None:
    """Return the size of a head; None: the hidden size over the number of heads."""
    channels = translation.count("kv-channels")
    hidden, heads = (translation.count(name, 1) for name in REQUIRED[1:])
    return None if channels is None or channels * heads == hidden else channels


def _sizes(translation: Translation, builder: str) -> None:
    """Translate the sizes that follow from others, and the dropout of the attention."""
    hidden, heads = (translation.count(name, 1) for name in REQUIRED[1:])
    groups = translation.count("num-query-groups") or 1
    if translation.boolean("group-query-attention"):
        translation.put("model.options.num_kv_heads", groups)
    elif builder == "llama":
        translation.put("model.options.num_kv_heads", heads)
    translation.put("model.options.head_dim", _head_dim(translation))
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if translation.boolean("swiglu") else 4 * hidden
    translation.put("model.options.ffn_size", translation.count("ffn-hidden-size") or usual)
    length = translation.count("max-position-embeddings") or translation.count("seq-length")
    translation.put("model.options.max_sequence_length", length)
    dropout = translation.number("attention-dropout", 0.1)
    if dropout != translation.tree["model.options.dropout"]:
        translation.put("model.options.attention_dropout", dropout)


def _vocabulary(translation: Translation, stand_in: int) -> None:
    """Translate the vocabulary: in the file, of a tokenizer with one version, or left open.

    The NullTokenizer of Megatron-Bridge counts its end of document in.
    """
    key, size = "model.options.vocab_size", translation.count("vocab-size")
    kind = translation.text("tokenizer-type")
    if kind is None and translation.has("merge-file"):
        kind = "GPT2BPETokenizer"
    if size is not None and kind == "NullTokenizer" and translation.framework == "Megatron-LM":
        why = (
            "--vocab-size and NullTokenizer's end of document; from megatron-core 0.18 on it is"
            " --vocab-size alone"
        )
        translation.put(key, size + 1, why)
    elif size is not None:
        translation.put(key, size)
    elif kind in VOCABULARIES:
        translation.put(key, VOCABULARIES[kind], f"{kind}'s")
    else:
        of_kind = f", {kind}" if kind else ""
        why = f"{translation.why_missing('vocab-size')}; Megatron-LM takes it from its tokenizer"
        translation.leave_open(key, stand_in, f"{why}{of_kind}")
        translation.drop("tokenizer-type", DropReason.BY_HAND, key)


def _window(translation: Translation) -> None:
    """Translate the sliding window, which counts the tokens before, and here the token itself too.

    Raises:
        ConfigError: the window is not one of tokens before.
    """
    written = translation.value("window-size")
    if written is None:
        return
    numbers = [whole_number(word, -1) for word in re.findall(r"-?\d+", str(written))]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] not in (0, -1):
        what = "a sliding window other than (tokens before, 0)"
        raise translation.unsupported_model("window-size", what)
    if numbers[0] != -1:
        why = "--window-size counts the tokens before, and not itself"
        translation.put("model.options.sliding_window", numbers[0] + 1, why)


def _multi_token(translation: Translation, builder: str) -> None:
    """Translate multi-token prediction. Its modules have rotary positions or none,
    in Megatron-LM as here.
    """
    modules = translation.integer("mtp-num-layers")
    if not modules:
        return
    if builder == "gpt2" or translation.tree.get("model.options.positions") == "learned":
        what = "multi-token prediction and learned positions"
        raise translation.unsupported_model("mtp-num-layers", what)
    translation.put("model.options.mtp_layers", translation.count("mtp-num-layers"))
    weight = translation.number("mtp-loss-scaling-factor", 0.1, minimum=0.0)
    why = (
        "the modules' losses too are divided by the labels of the next token, as with"
        " --calculate-per-token-loss"
    )
    translation.put("model.options.mtp_loss_weight", weight, why)
