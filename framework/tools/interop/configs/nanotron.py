"""Translation of nanotron's YAML files.

Source of keys, defaults and meaning: ``src/nanotron/config`` and ``helpers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.config.keys import format_value
from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.nanotron_keys import CONFIG, FACTORY, GATES, NOT_LLAMA, REST, SCHEDULES, Z_LOSS
from meshwright.tools.interop.configs.nanotron_optimizer import optimizer
from meshwright.tools.interop.configs.source_keys import CORPUS, PREPARED, PRETRAINED, SPECTRAL_MUP, DropReason, is_off
from meshwright.tools.interop.configs.translation import Draft

STAND_IN = "runs/data/corpus/train"
"""Path of a corpus that the user has to set."""


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
        _initial(draft)
    _layout(draft, ranks)
    optimizer(draft)
    _train(draft)
    draft.drop_rest(REST)


def _data(draft: Draft) -> None:
    """Carry over starts and weights of the stages; leave their corpora open, as nanotron's data has another form."""
    stages = draft.value("data_stages")
    stages = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    stages.sort(key=lambda stage: _start(stage) or 0)
    reads = "nanotron reads its own form{}"
    draft.leave_open(
        "data.train", _mixture(stages[0]) if stages else STAND_IN, PREPARED.format(reads.format(_sources(stages[:1])))
    )
    draft.drop("data_stages", DropReason.BY_HAND, CORPUS)
    if draft.has("doremi.domain_names"):
        draft.refuse("doremi.domain_names", "the weights of corpora are fixed here, not learnt or by domain")
    if len(stages) < 2:
        return
    starts = [_start(stage) or 0 for stage in stages]
    if starts != sorted(set(starts)) or starts[0] != 1:
        what = f"the first stage starts at step 1, and later ones after it; here: {', '.join(map(str, starts))}"
        draft.refuse("data_stages", f"{what}. Only the first would remain")
        return
    later = [{"from_step": _start(stage), "train": _mixture(stage)} for stage in stages[1:]]
    names = "; ".join(f"{stage.get('name', 'a stage')} from step {_start(stage)}" for stage in stages)
    reason = PREPARED.format(reads.format(_sources(stages[1:])))
    draft.leave_open("data.stages", later, f"{names}. {reason}")


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


def _initial(draft: Draft) -> None:
    """Translate the initial weights: nanotron's ``RandomInit``, or muP's, which are scaled by width."""
    method = "model.init_method"
    if draft.boolean(f"{method}.use_mup"):
        draft.refuse(f"{method}.use_mup", SPECTRAL_MUP)
    if draft.has(f"{method}.path"):
        draft.refuse(f"{method}.path", PRETRAINED)
    std = draft.number(f"{method}.std", 0.02)
    draft.put("model.options.init_std", None if std == 0.02 else std)
    scaling = (draft.text(f"{method}.scaling_method", "NUM_LAYERS") or "").upper()
    if scaling == "NONE":
        draft.put("model.options.residual_init", "none")
    elif scaling != "NUM_LAYERS":
        draft.refuse(f"{method}.scaling_method", "the last layers of branches are scaled by the number of layers here")


def _model(draft: Draft) -> None:
    for name, what in NOT_LLAMA.items():
        key = next(
            (key for key in draft.items if key == f"{CONFIG}.{name}" or key.startswith(f"{CONFIG}.{name}.")), None
        )
        if key is not None and not is_off(draft.value(key)):
            raise draft.unsupported_model(key, what)
    act = draft.text(f"{CONFIG}.hidden_act", "silu") or ""
    if act not in GATES:
        raise draft.unsupported_model(f"{CONFIG}.hidden_act", f"the activation {act} in its gate")
    kinds = [
        key for key in draft.items if key.startswith(f"{CONFIG}.is_") and key.endswith("_config") and draft.boolean(key)
    ]
    other = next((key for key in kinds if key.rpartition(".")[2] not in ("is_llama_config", "is_qwen2_config")), None)
    if other is not None or not kinds:
        raise draft.unsupported_model(
            other or "model.model_config", "this configuration class, only is_llama_config and is_qwen2_config"
        )
    heads = draft.count(f"{CONFIG}.num_attention_heads", 32)
    interpolation = draft.number(f"{CONFIG}.rope_seq_len_interpolation_factor") or 1.0
    if GATES[act] == "swiglu" and interpolation == 1:
        draft.put("model.builder", "meshwright.models.llama:build")
    else:
        draft.put(
            "model.builder", "meshwright.models.decoder:build", f"Llama with {act} and positions over {interpolation}"
        )
        draft.put("model.options.mlp", GATES[act])
        draft.put("model.options.rope_interpolation", None if interpolation == 1 else interpolation)
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
    if draft.boolean(f"{CONFIG}.z_loss_enabled"):
        draft.put("model.options.z_loss", draft.number(f"{CONFIG}.z_loss_coefficient", 1e-4))
        draft.drop(f"{CONFIG}.z_loss_enabled", DropReason.DIFFERS, Z_LOSS)
    draft.skip(f"{CONFIG}.z_loss*")
    mask = draft.items.get(f"{CONFIG}.flex_attention_mask")
    if draft.boolean(f"{CONFIG}._use_doc_masking") or (mask is not None and "document" in str(mask.value)):
        draft.skip(f"{CONFIG}.flex_attention_mask")
        draft.put("data.document_boundaries", True, "separates documents in attention, and here in the labels too")
    _positions(draft)


def _attention(draft: Draft, *, is_qwen: bool) -> None:
    """Translate biases and the sliding window. Only the default kernel counts the token itself, as here."""
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
    cp = draft.count("parallelism.context_parallel_size", 1)
    draft.put("parallel.cp", cp if cp > 1 else None)
    size = degrees["dp"] * degrees["pp"] * degrees["tp"] * cp
    if ranks is not None and ranks != size:
        raise ConfigError(
            "MW-INTEROP-010", f"--ranks {ranks}, but the file's dp x pp x cp x tp is {size}: leave --ranks out"
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


def _train(draft: Draft) -> None:
    length = draft.optional_count("tokens.sequence_length")
    if length is None:
        draft.leave_open("data.sequence_length", 2048, draft.why_missing("tokens.sequence_length"))
    draft.put("data.sequence_length", length)
    _data(draft)
    dtype = draft.text("model.dtype", "bfloat16") or ""
    draft.put("train.dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype))
    draft.put("run.seed", draft.integer("general.seed", 42))
    run = draft.text("general.run")
    if run is not None:
        name = draft.run_name(re.sub("_?%(date|jobid)", "", run))
        draft.put(
            "run.name", name, "the same name for every start, so that the same command resumes" if name != run else ""
        )
    draft.put("tracking.project", draft.text("general.project"))
    start = draft.text("checkpoints.resume_checkpoint_path")
    own = draft.text("checkpoints.checkpoints_path") or "checkpoints"
    if start is not None and not start.startswith(own):
        draft.refuse("checkpoints.resume_checkpoint_path", PRETRAINED)
    draft.put("checkpoint.every", draft.count("checkpoints.checkpoint_interval", 1000))
    draft.put("run.directory", draft.text("checkpoints.checkpoints_path", "checkpoints"))
    draft.put("tracking.log_every", draft.count("logging.iteration_step_info_interval", 1))
    every, batches = draft.integer("tokens.val_check_interval"), draft.integer("tokens.limit_val_batches")
    if every is not None and every > 0:
        reason = "nanotron takes validation batches from its own form of the data"
        draft.leave_open("data.validation", "runs/data/corpus/validation", reason)
        draft.put("train.validate_every", every)
        if batches:
            draft.put("train.validate_steps", batches, "global batches")
