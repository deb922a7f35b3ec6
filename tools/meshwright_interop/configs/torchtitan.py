"""Translation of torchtitan's TOML files (``JobConfig``, 2025 to February 2026).

Source of keys, defaults and meaning: ``torchtitan/config/job_config.py`` and the code that reads
it. Keys have their names of the last version; ``torchtitan_keys.MOVED`` maps older names to them.
"""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.system.numbers import whole_number
from meshwright_interop.configs.schedules import put_betas, put_decay, put_warmup
from meshwright_interop.configs.source_keys import CORPUS, PREPARED, DropReason, is_off
from meshwright_interop.configs.torchtitan_keys import (
    LAYOUT,
    NEAREST,
    OPTIMIZER,
    RULES,
    SCHEDULES,
    SERVICES,
    SEVERAL_STAGES,
    SWITCHES,
)
from meshwright_interop.configs.torchtitan_model import model
from meshwright_interop.configs.translation import Translation


def translate(translation: Translation, ranks: int | None) -> None:
    """Translate all keys of a file.

    Args:
        translation: the keys; receives the meshwright keys.
        ranks: number of ranks of the whole job; None: unknown.

    Raises:
        ConfigError: torchtitan does not accept a value, or meshwright has no such model.
    """
    translation.refuse_by(RULES)
    num_layers = None if translation.own_model else model(translation)
    _layout(translation, ranks)
    _pipeline(translation, num_layers)
    _batch(translation)
    _optimizer(translation)
    _data(translation)
    _recompute(translation, num_layers)
    _checkpoint(translation)
    _validation(translation)
    for section, switch in SWITCHES.items():
        if is_off(translation.items[switch].value if switch in translation.items else None):
            translation.skip(f"{section}.*")
    if translation.value("compile.components") == ["model", "loss"]:
        translation.skip("compile.*")
    translation.drop_rest(RULES)


# -- layout


def _layout(translation: Translation, ranks: int | None) -> None:
    """Translate the degrees of parallelism; the ranks that the others leave shard by FSDP."""
    translation.put_rows(LAYOUT)
    tp, pp = translation.tree["parallel.tp"], translation.tree["parallel.pp"]
    cp = translation.tree.get("parallel.cp", 1)
    replicas = translation.count("parallelism.data_parallel_replicate_degree", 1)
    shards = translation.integer("parallelism.data_parallel_shard_degree", -1)
    others = replicas * tp * pp * cp
    if shards == -1 and ranks is not None:
        shards, rest = divmod(ranks, others)
        if rest or not shards:
            raise ConfigError(
                "MW-INTEROP-026",
                f"--ranks {ranks} is not a multiple of {others}, the product of the other degrees"
                " in the file",
            )
    if tp > 1:
        sequence = translation.boolean("parallelism.enable_sequence_parallel", True)
        why = "torchtitan uses sequence parallelism whenever tp > 1" if sequence else ""
        translation.put("parallel.sequence", sequence, why)
    if shards != -1:
        translation.put("parallel.dp", replicas * shards)
        _zero(translation, replicas, shards * cp)
        return
    translation.put("parallel.dp", "auto", "fills the ranks; --ranks N fixes it")
    _zero(translation, replicas, None)
    if replicas > 1:
        note = "parallel.shard_factor, the ranks that shard one replica: --ranks N computes it"
        translation.drop("parallelism.data_parallel_replicate_degree", DropReason.BY_HAND, note)


def _zero(translation: Translation, replicas: int, shards: int | None) -> None:
    """Translate FSDP. ``shards``: size of its group, dp_shard x cp; None:
    all ranks that the other degrees leave.
    """
    policy = translation.text("parallelism.fsdp_reshard_after_forward") or "default"
    pp = translation.tree["parallel.pp"]
    if shards == 1:
        translation.put("parallel.zero", 0, "DDP: nothing is sharded")
        return
    if policy == "always" or (policy != "never" and pp == 1):
        translation.put("parallel.zero", 3, "FSDP2 shards weights, gradients and optimizer")
    else:
        of_pipeline = " in a pipeline" if policy == "default" else ""
        translation.put("parallel.zero", 2, f"FSDP2 keeps weights gathered{of_pipeline}")
    if pp > 1:
        why = "in a pipeline FSDP2 sums gradients once, after the last micro-batch"
        translation.put("parallel.reduce", "step", why)
    if replicas > 1 and shards is not None:
        why = f"{replicas} groups of {shards}: hybrid sharding"
        translation.put("parallel.shard_factor", shards, why)
    if translation.boolean("training.enable_cpu_offload"):
        translation.put("parallel.offload", True)


def _pipeline(translation: Translation, num_layers: int | None) -> None:
    """Translate the pipeline schedule, and the number of stages per rank."""
    pp, name = translation.tree["parallel.pp"], "parallelism.pipeline_parallel_schedule"
    theirs = (translation.text(name, "1F1B" if pp > 1 else None) or "").lower()
    per_stage = translation.count("parallelism.pipeline_parallel_layers_per_stage")
    if pp == 1:
        return
    schedule = SCHEDULES.get(theirs) or NEAREST.get(theirs, "1f1b")
    translation.put("pipeline.schedule", schedule)
    if theirs not in SCHEDULES:
        note = f'pipeline.schedule = "{schedule}" instead'
        translation.drop(name, DropReason.NONE, note)
    if theirs not in SEVERAL_STAGES:
        return
    # torchtitan's pipeline_llm: two stages per rank, unless the number of layers per stage is
    # given; then embedding and head count as a layer each
    interleave = 2
    if per_stage is not None and num_layers is not None:
        num_stages = -(-(num_layers + 2) // per_stage)
        interleave = max(1, num_stages // pp)
    translation.put("pipeline.interleave", interleave)


def _batch(translation: Translation) -> None:
    """Translate the batch: in a pipeline its local part is cut into micro-batches."""
    local = translation.count("training.local_batch_size", 8)
    is_cut = translation.tree["parallel.pp"] > 1
    default = 1 if is_cut else None
    micro = translation.count("parallelism.pipeline_parallel_microbatch_size", default)
    micro = micro if is_cut and micro is not None else local
    if local % micro:
        raise ConfigError(
            "MW-INTEROP-027",
            f"{translation.place('training.local_batch_size')}: {local} samples do not divide"
            f" into micro-batches of {micro} samples",
        )
    translation.put("batch.micro_batch_size", micro)
    total = translation.integer("training.global_batch_size", -1)
    if total > 0:
        translation.put("batch.global_batch", total)
    else:
        why = "torchtitan's global batch is local_batch_size x dp"
        translation.put("batch.chunks", local // micro, why)


# -- optimizer


def _optimizer(translation: Translation) -> None:
    """Translate the optimizer, its weight decay, and its learning rate."""
    translation.put_rows(OPTIMIZER)
    name = translation.text("optimizer.name", "AdamW")
    translation.put("optimizer.name", "adamw")
    decay = translation.number("optimizer.weight_decay", 0.1)
    why = "on matrices only; torchtitan decays norms and biases too" if decay else ""
    translation.put("optimizer.weight_decay", decay, why)
    if name == "Adam" and decay:
        why = "weight decay is decoupled here (AdamW), not added to the gradient"
        translation.refuse("optimizer.name", why)
    elif name not in ("Adam", "AdamW"):
        translation.refuse("optimizer.name", "no such optimizer here, only AdamW")
    put_betas(translation, "optimizer.", second=0.95)
    _learning_rate(translation)


def _learning_rate(translation: Translation) -> None:
    """Translate torchtitan's ``linear_warmup_stable_decay`` over ``total_steps``,
    or all steps of the run.
    """
    steps, peak = translation.tree["train.steps"], translation.tree["optimizer.learning_rate"]
    total = translation.count("lr_scheduler.total_steps") or steps
    warmup = min(translation.integer("lr_scheduler.warmup_steps", 200), total)
    put_warmup(translation, "lr_scheduler.warmup_steps", warmup, steps)
    low = peak * translation.number("lr_scheduler.min_lr_factor", 0.0)
    ratio = translation.number("lr_scheduler.decay_ratio")
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    if ratio == 0.0 or decay == 0:
        translation.text("lr_scheduler.decay_type", "linear")
        translation.put("optimizer.schedule", "constant")
        return
    # without the digits that only the product has
    translation.put("optimizer.min_learning_rate", float(f"{low:.12g}"))
    why = f"lr_scheduler.decay_ratio {ratio} of {total} steps"
    put_decay(translation, "lr_scheduler.decay_type", (warmup, total - decay, total), why)
    if total != steps:
        translation.put("optimizer.decay_until", total, "lr_scheduler.total_steps")


# -- data and services


def _data(translation: Translation) -> None:
    """Translate the length of a sample, the dtype and services; leave the corpus open."""
    translation.put_rows(SERVICES)
    if not translation.own_model:
        length = translation.tree["data.sequence_length"]
        translation.put("model.options.max_sequence_length", length)
    dataset = translation.text("training.dataset", "c4_test")
    reason = PREPARED.format(f"torchtitan reads {dataset}")
    translation.leave_open("data.train", f"runs/data/{dataset}/train", reason)
    translation.drop("training.dataset", DropReason.BY_HAND, CORPUS)
    whole = translation.text("training.dtype", "float32")
    mixed = translation.text("training.mixed_precision_param", "bfloat16")
    dtype = "bfloat16" if "bfloat16" in (whole, mixed) else "float32"
    why = "torchtitan's optimizer keeps float32" if whole == "float32" else ""
    translation.put("train.dtype", dtype, why)
    if whole == "bfloat16":
        note = "the optimizer keeps float32 master weights here"
        translation.drop("training.dtype", DropReason.DIFFERS, note)


def _recompute(translation: Translation, num_layers: int | None) -> None:
    """Translate activation checkpointing: all layers, every n-th one, or a choice of operations."""
    name = "activation_checkpoint.mode"
    mode = translation.text(name, "selective")
    default = "2" if mode == "selective" else None
    option = translation.text("activation_checkpoint.selective_ac_option", default)
    every = None if option is None else whole_number(option, 1)
    if mode == "full":
        translation.put("pipeline.recompute", "full")
    elif mode == "selective" and every is not None:
        why = f"selective_ac_option {option}: one of every {option} layers, fully"
        translation.put("pipeline.recompute", "full", why)
        if every > 1 and num_layers is not None:
            layers = [f"block{i}" for i in range(every - 1, num_layers, every)]
            translation.put("pipeline.recompute_layers", layers)
    elif mode == "selective" and "train.compile" in translation.tree:
        why = "a compiled layer is recomputed fully or not at all"
        translation.put("pipeline.recompute", "full", why)
        translation.drop(name, DropReason.DIFFERS, "more is recomputed")
    elif mode == "selective":
        why = "core attention; torchtitan chooses by operation"
        translation.put("pipeline.recompute", "selective", why)
    elif mode != "none":
        translation.drop(name, DropReason.NONE, "nothing is recomputed")


def _checkpoint(translation: Translation) -> None:
    """Translate checkpoints, if the file enables them."""
    if not translation.boolean("checkpoint.enable"):
        translation.decide(
            "checkpoint.every = 0: torchtitan saves nothing here; meshwright still saves after the"
            " last step, and every half hour (checkpoint.every_minutes)"
        )
        return
    every = translation.count("checkpoint.interval", 500)
    translation.put("checkpoint.every", every)
    keep = translation.integer("checkpoint.keep_latest_k", 10)
    if keep:
        translation.put("checkpoint.keep_last", keep)
    else:
        translation.put("checkpoint.keep_every", every, "keep_latest_k = 0 keeps all")
    mode = translation.value("checkpoint.async_mode", "disabled")
    translation.put("checkpoint.asynchronous", not is_off(mode))


def _validation(translation: Translation) -> None:
    """Translate validation, if the file enables it; its corpus is left open."""
    if not translation.boolean("validation.enable"):
        return
    dataset = translation.text("validation.dataset", "c4_validation")
    reason = PREPARED.format(f"torchtitan reads {dataset}")
    translation.leave_open("data.validation", f"runs/data/{dataset}/validation", reason)
    translation.drop("validation.dataset", DropReason.BY_HAND, reason)
    translation.put("train.validate_every", translation.integer("validation.freq") or 10)
    batches = translation.integer("validation.steps")
    if batches is not None and batches > 0:
        why = "global batches; torchtitan's validation has its own batch size"
        translation.put("train.validate_steps", batches, why)
    else:
        note = "train.validate_steps, in global batches: there is no 'all'"
        translation.drop("validation.steps", DropReason.BY_HAND, note)
