"""Translation of nanotron's YAML files.

Source of keys, defaults and meaning: ``src/nanotron/config`` and ``helpers.py``.
"""

from __future__ import annotations

import re

from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.translation import (
    CORPUS,
    FLOAT16,
    HALVES,
    PRETRAINED,
    TOKENIZER,
    TRACING,
    Draft,
    DropReason,
    DropRule,
    is_off,
)

CONFIG = "model.model_config"
FACTORY = "optimizer.optimizer_factory"
RATE = "optimizer.learning_rate_scheduler"
SCHEDULES = {"1f1b": "1f1b", "afab": "gpipe"}
NOT_LLAMA = {
    "no_rope_layer": "layers without positions",
    "moe_config": "mixture of experts",
    "rope_seq_len_interpolation_factor": "interpolated positions",
}
"""Keys of features that meshwright.models.llama lacks -> the feature; they are accepted if they are off."""
REST = (
    DropRule(
        "checkpoints.resume_checkpoint_path",
        DropReason.BY_HAND,
        "the same command resumes; nanotron's checkpoints are not read",
    ),
    DropRule("data_stages data.*", DropReason.BY_HAND, CORPUS),
    DropRule("s3_upload*", DropReason.NONE, "checkpoints stay in the run directory"),
    DropRule("model.init_method.path", DropReason.BY_HAND, PRETRAINED),
    DropRule("model.init_method.use_mup", DropReason.NONE, "no muP"),
    DropRule(
        "model.init_method.*",
        DropReason.DIFFERS,
        "meshwright.models.llama initialises with std 0.02, less in each residual branch's last layer",
    ),
    DropRule(
        "model.make_vocab_size_divisible_by", DropReason.NEEDLESS, "the vocabulary is padded for tp automatically"
    ),
    DropRule(f"{CONFIG}.*_token_id", DropReason.NEEDLESS, "the corpus stores its end-of-document token"),
    DropRule(f"{CONFIG}.z_loss*", DropReason.NONE, "no z-loss"),
    DropRule(f"{CONFIG}.rope_interleaved", DropReason.DIFFERS, HALVES),
    DropRule(f"{CONFIG}.flex_attention_mask", DropReason.BY_HAND, "data.document_boundaries separates documents"),
    DropRule("optimizer.accumulate_grad_in_fp32", DropReason.DIFFERS, "gradients are accumulated in float32"),
    DropRule(
        "optimizer.weight_decay_exclude_named_params",
        DropReason.DIFFERS,
        "biases and norms are never decayed, everything else is",
    ),
    DropRule("parallelism.expert_parallel_size", DropReason.NONE, "no expert parallelism"),
    DropRule("parallelism.context_parallel_size", DropReason.NONE, "no context parallelism"),
    DropRule("profiler*", DropReason.NONE, TRACING),
    DropRule("tokenizer.tokenizer_name_or_path", DropReason.BY_HAND, TOKENIZER),
    DropRule("checkpoints.save_initial_state lighteval* tokens.limit_test_batches", DropReason.NONE),
    DropRule(
        f"""checkpoints.* general.* logging.* metrics_logging* {FACTORY}.* parallelism.* tokenizer.*
        {CONFIG}.initializer_range {CONFIG}.pretraining_tp {CONFIG}.use_cache {CONFIG}._attn_implementation
        {CONFIG}._fused_* {CONFIG}._use_qkv_packed {CONFIG}.log_attn_probs""",
        DropReason.NEEDLESS,
    ),
)
"""Rows for all keys without a translation; the first match applies."""


def canonical(key: str) -> str:
    """Return the name of a key in the newest files. In older ones the optimizer's keys are one level higher."""
    section, _, name = key.partition(".")
    if section == "optimizer" and (name.startswith("adam_") or name in ("torch_adam_is_fused", "name")):
        return f"{FACTORY}.{name}"
    return key


def translate(draft: Draft, ranks: int | None) -> None:
    """Translate all keys of a file.

    Args:
        draft: the keys; receives the meshwright keys.
        ranks: number of ranks of the whole job; if given, it must equal the file's dp x pp x tp.

    Raises:
        ConfigError: nanotron does not accept a value, or meshwright has no such model.
    """
    if not draft.own_model:
        _model(draft)
    _layout(draft, ranks)
    _optimizer(draft)
    _train(draft)
    draft.drop_rest(REST)


def _model(draft: Draft) -> None:
    for name, what in NOT_LLAMA.items():
        key = next(
            (key for key in draft.items if key == f"{CONFIG}.{name}" or key.startswith(f"{CONFIG}.{name}.")), None
        )
        if key is not None and not is_off(draft.value(key)):
            raise draft.unsupported_model(key, what)
    act = draft.text(f"{CONFIG}.hidden_act", "silu")
    if act != "silu":
        raise draft.unsupported_model(f"{CONFIG}.hidden_act", f"the activation {act}")
    kinds = [
        key for key in draft.items if key.startswith(f"{CONFIG}.is_") and key.endswith("_config") and draft.boolean(key)
    ]
    other = next((key for key in kinds if key.rpartition(".")[2] not in ("is_llama_config", "is_qwen2_config")), None)
    if other is not None or not kinds:
        raise draft.unsupported_model(
            other or "model.model_config", "this configuration class, only is_llama_config and is_qwen2_config,"
        )
    heads = draft.count(f"{CONFIG}.num_attention_heads", 32)
    draft.put("model.builder", "meshwright.models.llama:build")
    draft.put("model.options.vocab_size", draft.count(f"{CONFIG}.vocab_size", 32000))
    draft.put("model.options.hidden_size", draft.count(f"{CONFIG}.hidden_size", 4096))
    draft.put("model.options.num_layers", draft.count(f"{CONFIG}.num_hidden_layers", 32))
    draft.put("model.options.num_heads", heads)
    draft.put("model.options.num_kv_heads", draft.integer(f"{CONFIG}.num_key_value_heads") or heads)
    draft.put("model.options.ffn_size", draft.count(f"{CONFIG}.intermediate_size", 11008))
    draft.put("model.options.max_sequence_length", draft.count(f"{CONFIG}.max_position_embeddings", 2048))
    draft.put("model.options.rope_theta", draft.number(f"{CONFIG}.rope_theta", 10000.0))
    draft.put("model.options.norm_eps", draft.number(f"{CONFIG}.rms_norm_eps", 1e-6))
    draft.put("model.options.tied", draft.boolean(f"{CONFIG}.tie_word_embeddings"))
    _attention(draft, is_qwen=f"{CONFIG}.is_qwen2_config" in kinds)
    if not draft.boolean(f"{CONFIG}.z_loss_enabled"):
        draft.skip(f"{CONFIG}.z_loss*")
    else:
        draft.drop(f"{CONFIG}.z_loss_enabled", DropReason.NONE, "no z-loss")
    mask = draft.items.get(f"{CONFIG}.flex_attention_mask")
    if draft.boolean(f"{CONFIG}._use_doc_masking") or (mask is not None and "document" in str(mask.value)):
        draft.skip(f"{CONFIG}.flex_attention_mask")
        draft.put("data.document_boundaries", True, "separates documents in attention, and here in the labels too")
    _positions(draft)


def _attention(draft: Draft, *, is_qwen: bool) -> None:
    """Translate biases and the window. Its kernels differ by one token: the default one counts the token itself."""
    bias, window = f"{CONFIG}.attention_bias", draft.optional_count(f"{CONFIG}.sliding_window_size")
    if draft.boolean(bias):
        if not is_qwen:
            raise draft.unsupported_model(bias, "biases in nanotron's Llama, which has none")
        draft.put("model.options.qkv_bias", True)
    if window is not None:
        kernel = draft.text(f"{CONFIG}._attn_implementation", "flash_attention_2")
        if not is_qwen or kernel != "flash_attention_2" or not draft.boolean(f"{CONFIG}._use_qkv_packed", True):
            raise draft.unsupported_model(
                f"{CONFIG}.sliding_window_size", "a sliding window outside of flash_attention_2 with packed q, k, v"
            )
        draft.put("model.options.sliding_window", window)


def _positions(draft: Draft) -> None:
    scaling = f"{CONFIG}.rope_scaling"
    names = {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    }
    if not any(key.startswith(f"{scaling}.") for key in draft.items):
        return
    kind = draft.text(f"{scaling}.rope_type") or draft.text(f"{scaling}.type")
    if kind != "llama3":
        name = next(key for key in draft.items if key.startswith(f"{scaling}."))
        raise draft.unsupported_model(name, f"rotary scaling {kind}, only llama3")
    for name, option in names.items():
        draft.put(f"model.options.{option}", draft.number(f"{scaling}.{name}"))
    length = draft.number(f"{scaling}.original_max_position_embeddings")
    draft.put("model.options.rope_original_length", None if length is None else int(length))


def _layout(draft: Draft, ranks: int | None) -> None:
    degrees = {axis: draft.count(f"parallelism.{axis}", 1) for axis in ("dp", "pp", "tp")}
    for axis, degree in degrees.items():
        draft.put(f"parallel.{axis}", degree)
    size = degrees["dp"] * degrees["pp"] * degrees["tp"]
    if ranks is not None and ranks != size:
        raise ConfigError(
            "MW-INTEROP-010", f"--ranks {ranks}, but the file's dp x pp x tp is {size}: leave --ranks out"
        )
    mode = (draft.text("parallelism.tp_mode", "ALL_REDUCE") or "").upper()
    if degrees["tp"] > 1 and mode == "REDUCE_SCATTER":
        draft.put("parallel.sequence", True)
    draft.put("parallel.zero", draft.integer("optimizer.zero_stage", 0))
    engine = (draft.text("parallelism.pp_engine", "afab" if degrees["pp"] > 1 else None) or "").lower()
    if degrees["pp"] > 1:
        draft.put("pipeline.schedule", SCHEDULES.get(engine, "1f1b"))
        if engine not in SCHEDULES:
            draft.drop("parallelism.pp_engine", DropReason.NONE, 'pipeline.schedule = "1f1b" instead')
    if draft.boolean("parallelism.recompute_layer"):
        draft.put("pipeline.recompute", "full")
    bucket_mb = draft.number("model.ddp_bucket_cap_mb")
    draft.put("parallel.bucket_bytes", None if bucket_mb is None else int(bucket_mb * 2**20))
    draft.put("batch.micro_batch_size", draft.count("tokens.micro_batch_size", 1))
    draft.put("batch.chunks", draft.count("tokens.batch_accumulation_per_replica", 1))


def _optimizer(draft: Draft) -> None:
    name = draft.text(f"{FACTORY}.name", "adamW") or ""
    draft.put("optimizer.name", "sgd" if name.lower() == "sgd" else "adamw")
    if name.lower() == "sgd":
        draft.put("optimizer.momentum", 0.0, "nanotron's SGD has none")
    elif name.lower() != "adamw":
        draft.drop(f"{FACTORY}.name", DropReason.NONE, 'optimizer.name = "adamw" instead')
    else:
        betas = [draft.number(f"{FACTORY}.adam_beta1", 0.9), draft.number(f"{FACTORY}.adam_beta2", 0.95)]
        draft.put("optimizer.betas", betas)
        draft.put("optimizer.eps", draft.number(f"{FACTORY}.adam_eps", 1e-8))
    decay = draft.number("optimizer.weight_decay", 0.01)
    draft.put(
        "optimizer.weight_decay", decay, "on matrices only; nanotron decays norms and biases too" if decay else ""
    )
    draft.put("optimizer.clip_norm", draft.number("optimizer.clip_grad") or 0.0)
    if draft.boolean("optimizer.accumulate_grad_in_fp32", True) is False:
        draft.drop("optimizer.accumulate_grad_in_fp32", DropReason.DIFFERS, "gradients are accumulated in float32")
    _learning_rate(draft)


def _learning_rate(draft: Draft) -> None:
    """Translate nanotron's lr_scheduler_builder.

    Its rate rises until ``lr_warmup_steps``, is flat until ``lr_decay_starting_step``, falls, and is flat at the end.
    """
    steps = draft.count("tokens.train_steps", 100)
    rate = draft.number(f"{RATE}.learning_rate", 3e-4)
    low = draft.number(f"{RATE}.min_decay_lr", rate)
    assert rate is not None and low is not None
    draft.put("train.steps", steps)
    draft.put("optimizer.learning_rate", rate)
    warmup = min(draft.integer(f"{RATE}.lr_warmup_steps", 0) or 0, steps)
    if (draft.text(f"{RATE}.lr_warmup_style", "linear")) == "constant":
        draft.put("optimizer.warmup_steps", 0, "lr_warmup_style constant starts at the peak rate")
    else:
        draft.put("optimizer.warmup_steps", warmup)
    start = draft.integer(f"{RATE}.lr_decay_starting_step")
    first = warmup if start is None else start
    last = first + (draft.integer(f"{RATE}.lr_decay_steps") or steps - warmup - (start or 0))
    style = draft.text(f"{RATE}.lr_decay_style", "linear")
    if low >= rate or first >= steps:
        draft.put("optimizer.schedule", "constant", "the rate never decays")
        return
    draft.put("optimizer.min_learning_rate", low)
    if style == "1-sqrt":
        draft.drop(f"{RATE}.lr_decay_style", DropReason.NONE, "the learning rate decays linearly instead")
    if first > warmup:
        draft.put("optimizer.schedule", "wsd")
        draft.put("optimizer.decay_steps", last - first, f"from lr_decay_starting_step {first} on")
        if style == "cosine":
            draft.drop(f"{RATE}.lr_decay_style", DropReason.DIFFERS, "the decay of wsd is linear here")
    else:
        draft.put("optimizer.schedule", "cosine" if style == "cosine" else "linear")
    if last != steps:
        draft.put("optimizer.decay_until", last)


def _train(draft: Draft) -> None:
    draft.put("data.sequence_length", draft.count("tokens.sequence_length", 2048))
    draft.put("data.train", "runs/data/corpus/train")
    dtype = draft.text("model.dtype", "bfloat16") or ""
    if dtype in ("float16", "fp16"):
        draft.put("train.dtype", "bfloat16")
        draft.drop("model.dtype", DropReason.NONE, FLOAT16)
    else:
        draft.put("train.dtype", {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype))
    draft.put("run.seed", draft.integer("general.seed", 42))
    run = draft.text("general.run")
    if run is not None:
        name = draft.run_name(re.sub("_?%(date|jobid)", "", run))
        draft.put(
            "run.name", name, "the same name for every start, so that the same command resumes" if name != run else ""
        )
    draft.put("tracking.project", draft.text("general.project"))
    draft.put("checkpoint.every", draft.count("checkpoints.checkpoint_interval", 1000))
    draft.put("run.directory", draft.text("checkpoints.checkpoints_path", "checkpoints"))
    draft.put("tracking.log_every", draft.count("logging.iteration_step_info_interval", 1))
    every, batches = draft.integer("tokens.val_check_interval"), draft.integer("tokens.limit_val_batches")
    if every is not None and every > 0:
        draft.put("data.validation", "runs/data/corpus/validation")
        draft.put("train.validate_every", every)
        if batches:
            draft.put("train.validate_steps", batches, "global batches")
