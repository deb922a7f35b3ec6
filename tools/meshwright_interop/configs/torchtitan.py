"""Translation of torchtitan's TOML files (``JobConfig``, 2024 to February 2026), or the same keys as JSON.

Source of keys, defaults and meaning: ``torchtitan/config/job_config.py`` and the code that reads it. Keys have their
names of the last version; ``torchtitan_keys.MOVED`` maps older names to them.
"""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.system.numbers import whole_number
from meshwright_interop.configs.source_keys import CORPUS, PREPARED, PRETRAINED, DropReason, is_off
from meshwright_interop.configs.torchtitan_keys import REST, SCHEDULES, SEVERAL_STAGES, SWITCHES
from meshwright_interop.configs.torchtitan_model import model
from meshwright_interop.configs.torchtitan_optimizer import optimizer
from meshwright_interop.configs.translation import Translation


def translate(translation: Translation, ranks: int | None) -> None:
    """Translate all keys of a file.

    Args:
        translation: the keys; receives the meshwright keys.
        ranks: number of ranks of the whole job; None: unknown.

    Raises:
        ConfigError: torchtitan does not accept a value, or meshwright has no such model.
    """
    num_layers = None if translation.own_model else model(translation)
    _layout(translation, ranks)
    _batch(translation, _pipeline(translation, num_layers))
    optimizer(translation)
    _train(translation)
    _recompute(translation, num_layers)
    _services(translation)
    _switched_off(translation)
    translation.drop_rest(REST)


def _layout(translation: Translation, ranks: int | None) -> None:
    replicas = translation.count("parallelism.data_parallel_replicate_degree", 1)
    shards = translation.integer("parallelism.data_parallel_shard_degree", -1)
    tp, pp = (translation.count(f"parallelism.{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline"))
    assert shards is not None
    cp = translation.count("parallelism.context_parallel_degree", 1)
    one = replicas * tp * pp * cp
    if shards == -1 and ranks is not None:
        shards, rest = divmod(ranks, one)
        if rest or not shards:
            raise ConfigError(
                "MW-INTEROP-026",
                f"--ranks {ranks} is not a multiple of {one}, the product of the other degrees in the file",
            )
    translation.put("parallel.tp", tp)
    translation.put("parallel.pp", pp)
    translation.put("parallel.cp", cp if cp > 1 else None)
    if tp > 1:
        sequence = translation.boolean("parallelism.enable_sequence_parallel", True)
        translation.put(
            "parallel.sequence", sequence, "torchtitan uses sequence parallelism whenever tp > 1" if sequence else ""
        )
    if shards == -1:
        translation.put("parallel.dp", "auto", "fills the ranks; --ranks N fixes it")
        if replicas > 1:
            note = "parallel.shard_factor, the ranks that shard one replica: --ranks N computes it"
            translation.drop("parallelism.data_parallel_replicate_degree", DropReason.BY_HAND, note)
    else:
        translation.put("parallel.dp", replicas * shards)
    _zero(translation, replicas, shards if shards == -1 else shards * cp, pp)


def _zero(translation: Translation, replicas: int, shards: int, pp: int) -> None:
    """Translate FSDP. ``shards``: size of its group, dp_shard x cp; -1: all ranks that the other degrees leave."""
    policy = translation.text("parallelism.fsdp_reshard_after_forward") or "default"
    if shards == 1:
        translation.put("parallel.zero", 0, "DDP: nothing is sharded")
        return
    gathers_again = policy == "always" or (policy != "never" and pp == 1)
    if gathers_again:
        translation.put("parallel.zero", 3, "FSDP2 shards weights, gradients and optimizer")
    else:
        why = "FSDP2 keeps weights gathered in a pipeline" if policy == "default" else "FSDP2 keeps weights gathered"
        translation.put("parallel.zero", 2, why)
    if pp > 1:
        translation.put(
            "parallel.reduce", "step", "in a pipeline FSDP2 sums gradients once, after the last micro-batch"
        )
    if replicas > 1 and shards > 1:
        translation.put("parallel.shard_factor", shards, f"{replicas} groups of {shards}: hybrid sharding")
    if translation.boolean("training.enable_cpu_offload"):
        translation.put("parallel.offload", True)


def _pipeline(translation: Translation, num_layers: int | None) -> int:
    """Translate the pipeline schedule, and return the number of stages per rank."""
    pp = translation.tree["parallel.pp"]
    name = (translation.text("parallelism.pipeline_parallel_schedule", "1F1B" if pp > 1 else None) or "").lower()
    per_stage = translation.optional_count("parallelism.pipeline_parallel_layers_per_stage")
    if pp == 1:
        return 1
    schedule = SCHEDULES.get(name)
    if schedule is None:
        schedule = "interleaved_1f1b" if name in SEVERAL_STAGES else "1f1b"
        translation.put("pipeline.schedule", schedule, "the nearest supported one")
        translation.drop(
            "parallelism.pipeline_parallel_schedule", DropReason.NONE, f'pipeline.schedule = "{schedule}" instead'
        )
    else:
        translation.put("pipeline.schedule", schedule)
    if name not in SEVERAL_STAGES:
        return 1
    # torchtitan's pipeline_llm: two stages per rank, unless the number of layers per stage is given; then embedding
    # and head count as a layer each
    interleave = 2 if per_stage is None or num_layers is None else max(1, -(-(num_layers + 2) // per_stage) // pp)
    translation.put("pipeline.interleave", interleave)
    return interleave


def _batch(translation: Translation, stages_per_rank: int) -> None:
    pp, local = translation.tree["parallel.pp"], translation.count("training.local_batch_size", 8)
    total = translation.integer("training.global_batch_size", -1)
    micro = local
    if pp > 1:
        chunks = translation.optional_count("parallelism.pipeline_parallel_microbatches")
        old = translation.items.get("parallelism.pipeline_parallel_degree")
        if chunks is None and old is not None and old.key.startswith("experimental."):
            chunks = pp * stages_per_rank
            translation.decide(f"batch: {chunks} micro-batches, as many as stages, torchtitan's rule until April 2025")
        if chunks is None:
            micro = translation.count("parallelism.pipeline_parallel_microbatch_size", 1)
        else:
            micro = max(1, local // chunks)
        if local % (chunks or micro):
            raise ConfigError(
                "MW-INTEROP-027",
                f"{translation.place('training.local_batch_size')}: {local} samples do not divide into "
                f"{f'{chunks} micro-batches' if chunks else f'micro-batches of {micro} samples'}",
            )
    else:
        translation.integer("parallelism.pipeline_parallel_microbatch_size")
        translation.optional_count("parallelism.pipeline_parallel_microbatches")
    translation.put("batch.micro_batch_size", micro)
    if total is not None and total > 0:
        translation.put("batch.global_batch", total)
    else:
        translation.put("batch.chunks", local // micro, "torchtitan's global batch is local_batch_size x dp")


def _train(translation: Translation) -> None:
    translation.put("data.sequence_length", translation.count("training.seq_len", 2048))
    if not translation.own_model:
        translation.put("model.options.max_sequence_length", translation.tree["data.sequence_length"])
    dataset = translation.text("training.dataset", "c4_test") or "corpus"
    translation.leave_open("data.train", f"runs/data/{dataset}/train", PREPARED.format(f"torchtitan reads {dataset}"))
    translation.drop("training.dataset", DropReason.BY_HAND, CORPUS)
    whole, mixed = (
        translation.text("training.dtype", "float32"),
        translation.text("training.mixed_precision_param", "bfloat16"),
    )
    low = "bfloat16" in (whole, mixed)
    translation.put(
        "train.dtype",
        "bfloat16" if low else "float32",
        "" if whole != "float32" else "torchtitan's optimizer keeps float32",
    )
    if whole == "bfloat16":
        translation.drop("training.dtype", DropReason.DIFFERS, "the optimizer keeps float32 master weights here")
    translation.put("run.seed", translation.integer("debug.seed"))


def _recompute(translation: Translation, num_layers: int | None) -> None:
    mode = translation.text("activation_checkpoint.mode", "selective")
    option = translation.text("activation_checkpoint.selective_ac_option", "2" if mode == "selective" else None)
    compiled = translation.boolean("compile.enable")
    if mode == "full":
        translation.put("pipeline.recompute", "full")
    elif mode == "selective" and option is not None and (every := whole_number(option, 1)) is not None:
        translation.put(
            "pipeline.recompute", "full", f"selective_ac_option {option}: one of every {option} layers, fully"
        )
        if every > 1 and num_layers is not None:
            translation.put("pipeline.recompute_layers", [f"block{i}" for i in range(every - 1, num_layers, every)])
    elif mode == "selective" and compiled:
        translation.put("pipeline.recompute", "full", "a compiled layer is recomputed fully or not at all")
        translation.drop(
            "activation_checkpoint.mode", DropReason.DIFFERS, 'pipeline.recompute = "full" instead: more is recomputed'
        )
    elif mode == "selective":
        translation.put("pipeline.recompute", "selective", "core attention; torchtitan chooses by operation")
    elif mode != "none":
        translation.drop("activation_checkpoint.mode", DropReason.NONE, "nothing is recomputed")
    if compiled:
        translation.put("train.compile", True)


def _services(translation: Translation) -> None:
    translation.put("run.directory", translation.text("job.dump_folder", "./outputs"))
    translation.put("tracking.log_every", translation.count("metrics.log_freq", 10))
    if translation.boolean("metrics.enable_wandb"):
        translation.put("tracking.wandb", "auto")
    translation.put("launch.timeout_s", translation.number("comm.train_timeout_seconds"))
    _checkpoint(translation)
    every, batches = translation.integer("validation.freq"), translation.integer("validation.steps")
    dataset = translation.text("validation.dataset")
    if translation.boolean("validation.enable"):
        name = dataset or "c4_validation"
        translation.leave_open(
            "data.validation", f"runs/data/{name}/validation", PREPARED.format(f"torchtitan reads {name}")
        )
        translation.drop(
            "validation.dataset",
            DropReason.BY_HAND,
            "data.validation, the path of a corpus prepared by `meshwright data`",
        )
        translation.put("train.validate_every", every or 10)
        if batches is not None and batches > 0:
            translation.put(
                "train.validate_steps", batches, "global batches; torchtitan's validation has its own batch size"
            )
        else:
            translation.drop(
                "validation.steps", DropReason.BY_HAND, "train.validate_steps, in global batches: there is no 'all'"
            )
    else:
        translation.skip("validation.*")


def _switched_off(translation: Translation) -> None:
    """Mark the keys of disabled features as read."""
    for section, switch in SWITCHES.items():
        if is_off(translation.items[switch].value if switch in translation.items else None):
            translation.skip(f"{section}.*")
    if translation.value("compile.components") == ["model", "loss"]:
        translation.skip("compile.*")


def _checkpoint(translation: Translation) -> None:
    if not translation.boolean("checkpoint.enable"):
        translation.skip("checkpoint.*")
        translation.decide(
            "checkpoint.every = 0: torchtitan saves nothing here; meshwright still saves after the last step, and "
            "every half hour (checkpoint.every_minutes)"
        )
        return
    for name in ("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"):
        if not is_off(translation.value(name)):
            translation.refuse(name, PRETRAINED)
    translation.put("checkpoint.every", translation.count("checkpoint.interval", 500))
    keep = translation.integer("checkpoint.keep_latest_k", 10)
    if keep:
        translation.put("checkpoint.keep_last", keep)
    else:
        translation.put("checkpoint.keep_every", translation.tree["checkpoint.every"], "keep_latest_k = 0 keeps all")
    translation.put("checkpoint.asynchronous", not is_off(translation.value("checkpoint.async_mode", "disabled")))
