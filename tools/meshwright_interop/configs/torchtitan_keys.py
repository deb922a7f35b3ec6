"""Tables of torchtitan's keys: moved keys, and keys without a translation, with the reason to drop them."""

from __future__ import annotations

from meshwright_interop.configs.source_keys import (
    BALANCE,
    CORPUS,
    FLOAT8,
    METRICS,
    TRACING,
    DropReason,
    DropRule,
)

MOVED = {
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.tokenizer_path": "model.hf_assets_path",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "validation.enabled": "validation.enable",
    **{
        f"experimental.{name}": f"parallelism.{name}"
        for name in (
            "pipeline_parallel_degree",
            "pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_split_points",
            "pipeline_parallel_microbatches",
            "context_parallel_degree",
            "enable_async_tensor_parallel",
        )
    },
}
"""Old name of a key -> its name in the last version with TOML files."""

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved_1f1b",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipe_v",
}
SEVERAL_STAGES = ("interleaved1f1b", "zbvzerobubble", "interleavedzerobubble", "loopedbfs", "dualpipev")

SWITCHES = {
    "profiling": "profiling.enable_profiling",
    "quantize": "model.converters",
    "compile": "compile.enable",
    "fault_tolerance": "fault_tolerance.enable",
    "memory_estimation": "memory_estimation.enable",
}
"""Section -> the key that enables it; without it the others of the section have no effect."""

REST = (
    DropRule("parallelism.enable_sequence_parallel", DropReason.NEEDLESS),
    DropRule("job.description", DropReason.NONE, "use a comment in the file"),
    DropRule("profiling.*", DropReason.NONE, TRACING),
    DropRule("metrics.enable_tensorboard", DropReason.NONE, METRICS),
    DropRule("*enable_fsdp_float8_all_gather", DropReason.NONE, "weights are gathered in the training dtype"),
    DropRule("model.converters float8.* quantize.* training.fp8_linear", DropReason.BY_HAND, FLOAT8),
    DropRule("mx.*", DropReason.NONE, "no MXFP8"),
    DropRule(
        "optimizer.early_step_in_backward", DropReason.NONE, "clipping needs the norm of all gradients before the step"
    ),
    DropRule("training.mixed_precision_reduce", DropReason.NEEDLESS, "gradients are accumulated in float32"),
    DropRule("training.dataset_path", DropReason.BY_HAND, CORPUS),
    DropRule("parallelism.context_parallel_*", DropReason.NEEDLESS, "the order of tokens changes no number"),
    DropRule(
        "parallelism.expert_* parallelism.pipeline_parallel_expert_parallel_overlap",
        DropReason.NONE,
        "experts are not imported",
    ),
    DropRule("parallelism.disable_loss_parallel", DropReason.NONE, "the loss is always vocabulary-parallel"),
    DropRule(
        "parallelism.pipeline_parallel_schedule_csv",
        DropReason.BY_HAND,
        "pipeline.schedule_file, in meshwright's format",
    ),
    DropRule(
        "parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part", DropReason.BY_HAND, BALANCE
    ),
    DropRule(
        "parallelism.pipeline_parallel_*_stage_less_layers",
        DropReason.DIFFERS,
        'pipeline.balance = "time" balances stages by cost',
    ),
    DropRule("checkpoint.folder", DropReason.NEEDLESS, "RUN/checkpoints"),
    DropRule("checkpoint.interval_type", DropReason.NEEDLESS, "steps"),
    DropRule("checkpoint.initial_load*", DropReason.NEEDLESS),
    DropRule("checkpoint.load*", DropReason.NEEDLESS, "the same command resumes from the newest sound checkpoint"),
    DropRule("checkpoint.*", DropReason.NONE, "a checkpoint always has the full state"),
    DropRule("compile.*", DropReason.NONE, "train.compile compiles each layer separately"),
    DropRule("comm.init_timeout_seconds", DropReason.DIFFERS, "launch.timeout_s applies to the whole run"),
    DropRule("fault_tolerance.*", DropReason.NONE, "launch.max_restarts restarts a failed run"),
    DropRule("memory_estimation.*", DropReason.NONE, "`meshwright dryrun CONFIG` estimates memory"),
    DropRule(
        """job.* activation_checkpoint.* comm.* debug.* experimental.* parallelism.enable_async_tensor_parallel
        parallelism.enable_approx_mid_point_load_balancer""",
        DropReason.NONE,
    ),
    DropRule(
        """metrics.* model.* optimizer.fused optimizer.implementation training.dataloader.* training.gc_*
        validation.*""",
        DropReason.NEEDLESS,
    ),
)
"""Rows for all keys without a translation; the first match applies."""
