"""Translation of nanotron's YAML files.

Source of keys, defaults and meaning: ``src/nanotron/config`` and ``helpers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.config.keys import format_value
from meshwright.errors import ConfigError
from meshwright_interop.configs.nanotron_keys import CONFIG, FACTORY, GATES, NOT_LLAMA, REST, SCHEDULES, Z_LOSS
from meshwright_interop.configs.nanotron_optimizer import optimizer
from meshwright_interop.configs.source_keys import CORPUS, PREPARED, PRETRAINED, SPECTRAL_MUP, DropReason, is_off
from meshwright_interop.configs.translation import Translation

STAND_IN = "runs/data/corpus/train"
"""Path of a corpus that the user has to set."""


def canonical(key: str) -> str:
    """Return the name of a key in the newest files. In older ones the optimizer's keys are one level higher."""
    section, _, name = key.partition(".")
    if section == "optimizer" and (name.startswith("adam_") or name in ("torch_adam_is_fused", "name")):
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
    if not translation.own_model:
        _model(translation)
        _initial(translation)
    _layout(translation, ranks)
    optimizer(translation)
    _train(translation)
    translation.drop_rest(REST)


def _data(translation: Translation) -> None:
    """Carry over starts and weights of the stages; leave their corpora open, as nanotron's data has another form."""
    stages = translation.value("data_stages")
    stages = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    stages.sort(key=lambda stage: _start(stage) or 0)
    reads = "nanotron reads its own form{}"
    translation.leave_open(
        "data.train", _mixture(stages[0]) if stages else STAND_IN, PREPARED.format(reads.format(_sources(stages[:1])))
    )
    translation.drop("data_stages", DropReason.BY_HAND, CORPUS)
    if translation.has("doremi.domain_names"):
        translation.refuse("doremi.domain_names", "the weights of corpora are fixed here, not learnt or by domain")
    if len(stages) < 2:
        return
    starts = [_start(stage) or 0 for stage in stages]
    if starts != sorted(set(starts)) or starts[0] != 1:
        what = f"the first stage starts at step 1, and later ones after it; here: {', '.join(map(str, starts))}"
        translation.refuse("data_stages", f"{what}. Only the first would remain")
        return
    later = [{"from_step": _start(stage), "train": _mixture(stage)} for stage in stages[1:]]
    names = "; ".join(f"{stage.get('name', 'a stage')} from step {_start(stage)}" for stage in stages)
    reason = PREPARED.format(reads.format(_sources(stages[1:])))
    translation.leave_open("data.stages", later, f"{names}. {reason}")


def _start(stage: dict[str, object]) -> int | None:
    start = stage.get("start_training_step")
    return start if isinstance(start, int) and not isinstance(start, bool) and start > 0 else None


def _mixture(stage: dict[str, object]) -> object:
    """Return stand-ins for the corpora of a stage: one path, or a list with the weights of the file."""
    data = stage.get("data")
    dataset = data.get("dataset") if isinstance(data, dict) else None
    folders = dataset.get("dataset_folder") if isinstance(dataset, dict) else None
    weights = list(folders.values()) if isinstance(folders, dict) else None
    if isinstance(folders, list) and isinstance(dataset, dict):
        weights = dataset.get("dataset_weights") or [1.0] * len(folders)
        if not isinstance(weights, list) or len(weights) != len(folders):
            weights = None
    if not weights or len(weights) < 2 or not all(isinstance(each, int | float) and each > 0 for each in weights):
        return STAND_IN
    return [{"path": STAND_IN, "weight": float(weight)} for weight in weights]


def _sources(stages: Sequence[dict[str, object]]) -> str:
    """Return the datasets of stages for a message."""
    names = ("dataset_folder", "hf_dataset_or_datasets", "training_folder")
    texts = []
    for stage in stages:
        data = stage.get("data")
        dataset = data.get("dataset") if isinstance(data, dict) else None
        found = [dataset[name] for name in names if dataset.get(name)] if isinstance(dataset, dict) else []
        texts += [format_value(found[0])] if found else []
    return f" ({'; '.join(texts)})" if texts else ""


def _initial(translation: Translation) -> None:
    """Translate the initial weights: nanotron's ``RandomInit``, or muP's, which are scaled by width."""
    method = "model.init_method"
    if translation.boolean(f"{method}.use_mup"):
        translation.refuse(f"{method}.use_mup", SPECTRAL_MUP)
    if translation.has(f"{method}.path"):
        translation.refuse(f"{method}.path", PRETRAINED)
    std = translation.number(f"{method}.std", 0.02)
    translation.put("model.options.init_std", None if std == 0.02 else std)
    scaling = (translation.text(f"{method}.scaling_method", "NUM_LAYERS") or "").upper()
    if scaling == "NONE":
        translation.put("model.options.residual_init", "none")
    elif scaling != "NUM_LAYERS":
        translation.refuse(f"{method}.scaling_method", "nanotron itself has NUM_LAYERS and NONE only")


def _model(translation: Translation) -> None:
    for name, what in NOT_LLAMA.items():
        key = next(
            (key for key in translation.items if key == f"{CONFIG}.{name}" or key.startswith(f"{CONFIG}.{name}.")), None
        )
        if key is not None and not is_off(translation.value(key)):
            raise translation.unsupported_model(key, what)
    act = translation.text(f"{CONFIG}.hidden_act", "silu") or ""
    if act not in GATES:
        raise translation.unsupported_model(f"{CONFIG}.hidden_act", f"the activation {act} in its gate")
    kinds = [
        key
        for key in translation.items
        if key.startswith(f"{CONFIG}.is_") and key.endswith("_config") and translation.boolean(key)
    ]
    other = next((key for key in kinds if key.rpartition(".")[2] not in ("is_llama_config", "is_qwen2_config")), None)
    if other is not None or not kinds:
        raise translation.unsupported_model(
            other or "model.model_config", "this configuration class, only is_llama_config and is_qwen2_config"
        )
    heads = translation.count(f"{CONFIG}.num_attention_heads", 32)
    interpolation = translation.number(f"{CONFIG}.rope_seq_len_interpolation_factor") or 1.0
    if GATES[act] == "swiglu" and interpolation == 1:
        translation.put("model.builder", "meshwright_models.llama:build")
    else:
        translation.put(
            "model.builder", "meshwright_models.decoder:build", f"Llama with {act} and positions over {interpolation}"
        )
        translation.put("model.options.mlp", GATES[act])
        translation.put("model.options.rope_interpolation", None if interpolation == 1 else interpolation)
    translation.put("model.options.vocab_size", translation.count(f"{CONFIG}.vocab_size", 32000))
    translation.put("model.options.hidden_size", translation.count(f"{CONFIG}.hidden_size", 4096))
    translation.put("model.options.num_layers", translation.count(f"{CONFIG}.num_hidden_layers", 32))
    translation.put("model.options.num_heads", heads)
    translation.put("model.options.num_kv_heads", translation.integer(f"{CONFIG}.num_key_value_heads") or heads)
    translation.put("model.options.ffn_size", translation.count(f"{CONFIG}.intermediate_size", 11008))
    translation.put("model.options.max_sequence_length", translation.count(f"{CONFIG}.max_position_embeddings", 2048))
    translation.put("model.options.rope_theta", translation.number(f"{CONFIG}.rope_theta", 10000.0))
    translation.put("model.options.norm_eps", translation.number(f"{CONFIG}.rms_norm_eps", 1e-6))
    translation.put("model.options.tied", translation.boolean(f"{CONFIG}.tie_word_embeddings"))
    _attention(translation, is_qwen=f"{CONFIG}.is_qwen2_config" in kinds)
    if translation.boolean(f"{CONFIG}.z_loss_enabled"):
        translation.put("model.options.z_loss", translation.number(f"{CONFIG}.z_loss_coefficient", 1e-4))
        translation.drop(f"{CONFIG}.z_loss_enabled", DropReason.DIFFERS, Z_LOSS)
    translation.skip(f"{CONFIG}.z_loss*")
    mask = translation.items.get(f"{CONFIG}.flex_attention_mask")
    if translation.boolean(f"{CONFIG}._use_doc_masking") or (mask is not None and "document" in str(mask.value)):
        translation.skip(f"{CONFIG}.flex_attention_mask")
        translation.put(
            "data.document_boundaries", True, "separates documents in attention, and here in the labels too"
        )
    _positions(translation)


def _attention(translation: Translation, *, is_qwen: bool) -> None:
    """Translate biases and the sliding window. Only the default kernel counts the token itself, as here."""
    bias, window = f"{CONFIG}.attention_bias", translation.optional_count(f"{CONFIG}.sliding_window_size")
    if translation.boolean(bias):
        if not is_qwen:
            raise translation.unsupported_model(bias, "biases in nanotron's Llama, which has none")
        translation.put("model.options.qkv_bias", True)
    if window is not None:
        kernel = translation.text(f"{CONFIG}._attn_implementation", "flash_attention_2")
        if not is_qwen or kernel != "flash_attention_2" or not translation.boolean(f"{CONFIG}._use_qkv_packed", True):
            raise translation.unsupported_model(
                f"{CONFIG}.sliding_window_size", "a sliding window outside of flash_attention_2 with packed q, k, v"
            )
        translation.put("model.options.sliding_window", window)


def _positions(translation: Translation) -> None:
    scaling = f"{CONFIG}.rope_scaling"
    names = {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    }
    if not any(key.startswith(f"{scaling}.") for key in translation.items):
        return
    kind = translation.text(f"{scaling}.rope_type") or translation.text(f"{scaling}.type")
    if kind != "llama3":
        name = next(key for key in translation.items if key.startswith(f"{scaling}."))
        raise translation.unsupported_model(name, f"rotary scaling {kind}, only llama3")
    for name, option in names.items():
        translation.put(f"model.options.{option}", translation.number(f"{scaling}.{name}"))
    length = translation.number(f"{scaling}.original_max_position_embeddings")
    translation.put("model.options.rope_original_length", None if length is None else int(length))


def _layout(translation: Translation, ranks: int | None) -> None:
    degrees = {axis: translation.count(f"parallelism.{axis}", 1) for axis in ("dp", "pp", "tp")}
    for axis, degree in degrees.items():
        translation.put(f"parallel.{axis}", degree)
    cp = translation.count("parallelism.context_parallel_size", 1)
    translation.put("parallel.cp", cp if cp > 1 else None)
    size = degrees["dp"] * degrees["pp"] * degrees["tp"] * cp
    if ranks is not None and ranks != size:
        raise ConfigError(
            "MW-INTEROP-010", f"--ranks {ranks}, but the file's dp x pp x cp x tp is {size}: leave --ranks out"
        )
    mode = (translation.text("parallelism.tp_mode", "ALL_REDUCE") or "").upper()
    if degrees["tp"] > 1 and mode == "REDUCE_SCATTER":
        translation.put("parallel.sequence", True)
    translation.put("parallel.zero", translation.integer("optimizer.zero_stage", 0))
    engine = (translation.text("parallelism.pp_engine", "afab" if degrees["pp"] > 1 else None) or "").lower()
    if degrees["pp"] > 1:
        translation.put("pipeline.schedule", SCHEDULES.get(engine, "1f1b"))
        if engine not in SCHEDULES:
            translation.drop("parallelism.pp_engine", DropReason.NONE, 'pipeline.schedule = "1f1b" instead')
    if translation.boolean("parallelism.recompute_layer"):
        translation.put("pipeline.recompute", "full")
    bucket_mb = translation.number("model.ddp_bucket_cap_mb")
    translation.put("parallel.bucket_bytes", None if bucket_mb is None else int(bucket_mb * 2**20))
    translation.put("batch.micro_batch_size", translation.count("tokens.micro_batch_size", 1))
    translation.put("batch.chunks", translation.count("tokens.batch_accumulation_per_replica", 1))


def _train(translation: Translation) -> None:
    length = translation.optional_count("tokens.sequence_length")
    if length is None:
        translation.leave_open("data.sequence_length", 2048, translation.why_missing("tokens.sequence_length"))
    translation.put("data.sequence_length", length)
    _data(translation)
    dtype = translation.text("model.dtype", "bfloat16") or ""
    translation.put("train.dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype))
    translation.put("run.seed", translation.integer("general.seed", 42))
    run = translation.text("general.run")
    if run is not None:
        name = translation.run_name(re.sub("_?%(date|jobid)", "", run))
        translation.put(
            "run.name", name, "the same name for every start, so that the same command resumes" if name != run else ""
        )
    translation.put("tracking.project", translation.text("general.project"))
    start = translation.text("checkpoints.resume_checkpoint_path")
    own = translation.text("checkpoints.checkpoints_path") or "checkpoints"
    if start is not None and not start.startswith(own):
        translation.refuse("checkpoints.resume_checkpoint_path", PRETRAINED)
    translation.put("checkpoint.every", translation.count("checkpoints.checkpoint_interval", 1000))
    translation.put("run.directory", translation.text("checkpoints.checkpoints_path", "checkpoints"))
    translation.put("tracking.log_every", translation.count("logging.iteration_step_info_interval", 1))
    every, batches = translation.integer("tokens.val_check_interval"), translation.integer("tokens.limit_val_batches")
    if every is not None and every > 0:
        reason = "nanotron takes validation batches from its own form of the data"
        translation.leave_open("data.validation", "runs/data/corpus/validation", reason)
        translation.put("train.validate_every", every)
        if batches:
            translation.put("train.validate_steps", batches, "global batches")
