"""Translation of nanotron's YAML files.

Source of keys, defaults and meaning: ``src/nanotron/config`` and ``helpers.py``.
"""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright_interop.configs.nanotron_keys import (
    CONFIG,
    FACTORY,
    GATES,
    LAYOUT,
    MODEL,
    RATE,
    RULES,
    SCHEDULES,
    SERVICES,
)
from meshwright_interop.configs.schedules import put_betas, put_decay, put_warmup
from meshwright_interop.configs.source_keys import CORPUS, PREPARED, PRETRAINED, DropReason
from meshwright_interop.configs.translation import Translation

CLASSES = ("is_llama_config", "is_qwen2_config")


def canonical(key: str) -> str:
    """Return the name of a key in the newest files.
    In older ones the optimizer's keys are one level higher.
    """
    section, _, name = key.partition(".")
    is_of_factory = name.startswith("adam_") or name in ("torch_adam_is_fused", "name")
    if section == "optimizer" and is_of_factory:
        return f"{FACTORY}.{name}"
    return key


def translate(translation: Translation, ranks: int | None) -> None:
    """Translate all keys of a file.

    Args:
        translation: the keys; receives the meshwright keys.
        ranks: number of ranks of the whole job; if given, it must equal the file's dp x pp x tp.

    Raises:
        ConfigError: nanotron does not accept a value, or meshwright has no such model.
    """
    translation.refuse_by(RULES)
    if not translation.own_model:
        _model(translation)
    _layout(translation, ranks)
    _optimizer(translation)
    _learning_rate(translation)
    _data(translation)
    _services(translation)
    translation.drop_rest(RULES)


# -- model


def _model(translation: Translation) -> None:
    """Translate the model: a Llama, or with another gate or interpolated positions a decoder."""
    is_qwen = _is_qwen(translation)
    activation = translation.text(f"{CONFIG}.hidden_act", "silu")
    if activation not in GATES:
        what = f"the activation {activation} in its gate"
        raise translation.unsupported_model(f"{CONFIG}.hidden_act", what)
    factor = translation.number(f"{CONFIG}.rope_seq_len_interpolation_factor") or 1.0
    if GATES[activation] == "swiglu" and factor == 1:
        translation.put("model.builder", "meshwright_models.llama:build")
    else:
        why = f"Llama with {activation} and positions over {factor}"
        translation.put("model.builder", "meshwright_models.decoder:build", why)
        translation.put("model.options.mlp", GATES[activation])
        translation.put("model.options.rope_interpolation", None if factor == 1 else factor)
    _check_rope_scaling(translation)
    translation.put_rows(MODEL)
    kv_heads = translation.integer(f"{CONFIG}.num_key_value_heads")
    translation.put(
        "model.options.num_kv_heads", kv_heads or translation.tree["model.options.num_heads"]
    )
    _attention(translation, is_qwen=is_qwen)
    _loss(translation)
    _residuals(translation)


def _is_qwen(translation: Translation) -> bool:
    """Return True for nanotron's Qwen2, and False for its Llama.

    Raises:
        ConfigError: another class, or none.
    """
    kinds = [
        key
        for key in translation.items
        if key.startswith(f"{CONFIG}.is_") and key.endswith("_config") and translation.boolean(key)
    ]
    others = [key for key in kinds if key.rpartition(".")[2] not in CLASSES]
    if others or not kinds:
        what = f"this configuration class, only {' and '.join(CLASSES)}"
        raise translation.unsupported_model((*others, "model.model_config")[0], what)
    return f"{CONFIG}.is_qwen2_config" in kinds


def _check_rope_scaling(translation: Translation) -> None:
    """Check that the rotary positions are plain, or scaled as Llama 3.1's."""
    scaling = f"{CONFIG}.rope_scaling."
    keys = [key for key in translation.items if key.startswith(scaling)]
    kind = translation.text(f"{scaling}rope_type") or translation.text(f"{scaling}type")
    if keys and kind != "llama3":
        raise translation.unsupported_model(keys[0], f"rotary scaling {kind}, only llama3")


def _attention(translation: Translation, *, is_qwen: bool) -> None:
    """Translate biases and the sliding window. Only the default kernel counts the token itself,
    as here.
    """
    bias, window = f"{CONFIG}.attention_bias", f"{CONFIG}.sliding_window_size"
    if translation.boolean(bias):
        if not is_qwen:
            raise translation.unsupported_model(bias, "biases in nanotron's Llama, which has none")
        translation.put("model.options.qkv_bias", True)
    size = translation.count(window)
    if size is None:
        return
    kernel = translation.text(f"{CONFIG}._attn_implementation", "flash_attention_2")
    is_packed = translation.boolean(f"{CONFIG}._use_qkv_packed", True)
    if not is_qwen or kernel != "flash_attention_2" or not is_packed:
        what = "a sliding window outside of flash_attention_2 with packed q, k, v"
        raise translation.unsupported_model(window, what)
    translation.put("model.options.sliding_window", size)


def _loss(translation: Translation) -> None:
    """Translate the loss of the logits' size, and the mask of documents."""
    if translation.boolean(f"{CONFIG}.z_loss_enabled"):
        coefficient = translation.number(f"{CONFIG}.z_loss_coefficient", 1e-4)
        translation.put("model.options.z_loss", coefficient)
        note = "nanotron squares the logsumexp of the logits less the largest of them"
        translation.drop(f"{CONFIG}.z_loss_enabled", DropReason.DIFFERS, note)
    mask = translation.items.get(f"{CONFIG}.flex_attention_mask")
    is_of_documents = mask is not None and "document" in str(mask.value)
    if translation.boolean(f"{CONFIG}._use_doc_masking") or is_of_documents:
        translation.skip(f"{CONFIG}.flex_attention_mask")
        why = "separates documents in attention, and here in the labels too"
        translation.put("data.document_boundaries", True, why)


def _residuals(translation: Translation) -> None:
    """Translate the scaling of the residual projections' initial weights."""
    name = "model.init_method.scaling_method"
    scaling = translation.text(name, "NUM_LAYERS").upper()
    if scaling == "NONE":
        translation.put("model.options.residual_init", "none")
    elif scaling != "NUM_LAYERS":
        translation.refuse(name, "nanotron itself has NUM_LAYERS and NONE only")


# -- layout


def _layout(translation: Translation, ranks: int | None) -> None:
    """Translate degrees, batch and pipeline schedule."""
    translation.put_rows(LAYOUT)
    dp, pp, tp = (translation.tree[f"parallel.{axis}"] for axis in ("dp", "pp", "tp"))
    size = dp * pp * tp * translation.tree.get("parallel.cp", 1)
    if ranks not in (None, size):
        raise ConfigError(
            "MW-INTEROP-010",
            f"--ranks {ranks}, but the file's dp x pp x cp x tp is {size}: leave --ranks out",
        )
    mode = translation.text("parallelism.tp_mode", "ALL_REDUCE")
    if tp > 1 and mode.upper() == "REDUCE_SCATTER":
        translation.put("parallel.sequence", True)
    engine = translation.text("parallelism.pp_engine", "afab" if pp > 1 else None) or ""
    if pp > 1:
        translation.put("pipeline.schedule", SCHEDULES.get(engine.lower(), "1f1b"))
        if engine.lower() not in SCHEDULES:
            note = 'pipeline.schedule = "1f1b" instead'
            translation.drop("parallelism.pp_engine", DropReason.NONE, note)


# -- optimizer


def _optimizer(translation: Translation) -> None:
    """Translate the optimizer, its weight decay and clipping."""
    name = translation.text(f"{FACTORY}.name", "adamW").lower()
    translation.put("optimizer.name", "sgd" if name == "sgd" else "adamw")
    if name == "sgd":
        translation.put("optimizer.momentum", 0.0, "nanotron's SGD has none")
    elif name == "adamw":
        put_betas(translation, f"{FACTORY}.adam_", second=0.95)
    else:
        translation.refuse(f"{FACTORY}.name", "no such optimizer here, only adamW and sgd")
    decay = translation.number("optimizer.weight_decay", 0.01)
    why = "on matrices only; nanotron decays norms and biases too" if decay else ""
    translation.put("optimizer.weight_decay", decay, why)
    translation.put("optimizer.clip_norm", translation.number("optimizer.clip_grad") or 0.0)


def _learning_rate(translation: Translation) -> None:
    """Translate nanotron's lr_scheduler_builder.

    Its rate rises until ``lr_warmup_steps``, is flat until ``lr_decay_starting_step``, falls, and
    is flat at the end.
    """
    name = "tokens.train_steps"
    steps = translation.put_or_leave_open("train.steps", name, translation.count(name), 10**6)
    name = f"{RATE}.learning_rate"
    peak = translation.number(name)
    peak = translation.put_or_leave_open("optimizer.learning_rate", name, peak, 3e-4)
    low = translation.number(f"{RATE}.min_decay_lr", peak)
    name = f"{RATE}.lr_warmup_steps"
    warmup = translation.integer(name, 0)
    if translation.text(f"{RATE}.lr_warmup_style", "linear") == "constant":
        why = "lr_warmup_style constant starts at the peak rate"
        translation.put("optimizer.warmup_steps", 0, why)
    else:
        put_warmup(translation, name, warmup, steps)
    _decay(translation, steps, min(warmup, steps), is_constant=low >= peak)
    if translation.tree["optimizer.schedule"] != "constant":
        translation.put("optimizer.min_learning_rate", low)


def _decay(translation: Translation, steps: int, warmup: int, *, is_constant: bool) -> None:
    """Translate the form of the decay, its first step and its last one."""
    start = translation.integer(f"{RATE}.lr_decay_starting_step")
    length = translation.integer(f"{RATE}.lr_decay_steps")
    first = warmup if start is None else start
    last = first + (length or steps - warmup - (start or 0))
    style = f"{RATE}.lr_decay_style"
    if is_constant or first >= steps:
        translation.text(style, "linear")
        translation.put("optimizer.schedule", "constant", "the rate never decays")
        return
    if first < warmup:
        why = "no decay here that starts inside of the warm-up"
        translation.refuse(f"{RATE}.lr_decay_starting_step", why)
    why = f"from lr_decay_starting_step {first} on"
    put_decay(translation, style, (warmup, first, last), why)
    if last != steps:
        translation.put("optimizer.decay_until", last)


# -- data and services


def _data(translation: Translation) -> None:
    """Leave the corpora open, as nanotron's data has another form, and validation with them."""
    name = "tokens.sequence_length"
    length = translation.count(name)
    translation.put_or_leave_open("data.sequence_length", name, length, 2048)
    form = "nanotron reads its own form"
    translation.leave_open("data.train", "runs/data/corpus/train", PREPARED.format(form))
    stages = translation.value("data_stages")
    later = "; of later stages data.stages" if isinstance(stages, list) and stages[1:] else ""
    translation.drop("data_stages", DropReason.BY_HAND, f"{CORPUS}{later}")
    every = translation.integer("tokens.val_check_interval")
    batches = translation.integer("tokens.limit_val_batches")
    if every is not None and every > 0:
        reason = "nanotron takes validation batches from its own form of the data"
        translation.leave_open("data.validation", "runs/data/corpus/validation", reason)
        translation.put("train.validate_every", every)
        translation.put("train.validate_steps", batches or None, "global batches")


def _services(translation: Translation) -> None:
    """Translate the run's name, its checkpoints and tracking."""
    translation.put_rows(SERVICES)
    run = translation.text("general.run")
    if run is not None:
        name = translation.run_name(re.sub("_?%(date|jobid)", "", run))
        why = "the same name for every start, so that the same command resumes"
        translation.put("run.name", name, why if name != run else "")
    start = translation.text("checkpoints.resume_checkpoint_path")
    if start is not None and not start.startswith(translation.tree["run.directory"]):
        translation.refuse("checkpoints.resume_checkpoint_path", PRETRAINED)
