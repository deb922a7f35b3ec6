"""Tables of torchtitan's keys: moved keys, and keys that no code reads, with the reason why they are left out."""

from __future__ import annotations

from meshwright.tools.interop.configs.translation import Rest, Why

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
    Rest("job.description", Why.NONE, "a comment in the file does it"),
    Rest("job.*", Why.NONE),
    Rest(
        "profiling.*", Why.NONE, "tracking.trace_step measures one step of each start; `meshwright draw RUN` shows it"
    ),
    Rest("metrics.enable_tensorboard", Why.NONE, "metrics.jsonl has every step; tracking.wandb sends it on"),
    Rest("metrics.*", Why.NEEDLESS),
    Rest("model.converters", Why.NONE, "there is no float8"),
    Rest("model.*", Why.NEEDLESS),
    Rest("float8.*", Why.NONE, "there is no float8"),
    Rest("quantize.*", Why.NONE, "there is no float8"),
    Rest("mx.*", Why.NONE, "there is no MXFP8"),
    Rest("optimizer.fused", Why.NEEDLESS),
    Rest("optimizer.implementation", Why.NEEDLESS),
    Rest("optimizer.early_step_in_backward", Why.NONE, "the step waits for the norm of all gradients"),
    Rest("training.dataloader.*", Why.NEEDLESS),
    Rest("training.gc_*", Why.NEEDLESS),
    Rest("training.fp8_linear", Why.NONE, "there is no float8"),
    Rest("training.mixed_precision_reduce", Why.NEEDLESS, "gradients are added up in float32"),
    Rest("training.dataset_path", Why.BY_HAND, "data.train, the path of tokens that `meshwright data` has prepared"),
    Rest("parallelism.context_parallel_*", Why.NONE, "there is no context parallelism"),
    Rest("parallelism.expert_*", Why.NONE, "there is no expert parallelism"),
    Rest("parallelism.enable_async_tensor_parallel", Why.NONE),
    Rest("parallelism.enable_approx_mid_point_load_balancer", Why.NONE),
    Rest("parallelism.disable_loss_parallel", Why.NONE, "the loss is always split over the vocabulary"),
    Rest("parallelism.pipeline_parallel_schedule_csv", Why.BY_HAND, "pipeline.schedule_file, in this project's form"),
    Rest("parallelism.pipeline_parallel_split_points", Why.BY_HAND, "pipeline.balance, as numbers of layers"),
    Rest("parallelism.module_fqns_per_model_part", Why.BY_HAND, "pipeline.balance, as numbers of layers"),
    Rest("parallelism.pipeline_parallel_*_stage_less_layers", Why.DIFFERS, 'pipeline.balance = "time" cuts by cost'),
    Rest("parallelism.pipeline_parallel_expert_parallel_overlap", Why.NONE, "there is no expert parallelism"),
    Rest("checkpoint.folder", Why.NEEDLESS, "RUN/checkpoints"),
    Rest("checkpoint.interval_type", Why.NEEDLESS, "steps"),
    Rest("checkpoint.initial_load*", Why.BY_HAND, "weights of elsewhere are converted first"),
    Rest("checkpoint.load*", Why.NEEDLESS, "the same command goes on from the newest sound checkpoint"),
    Rest("checkpoint.*", Why.NONE, "a checkpoint has all of the state"),
    Rest("activation_checkpoint.*", Why.NONE),
    Rest("compile.*", Why.NONE, "train.compile compiles each layer on its own"),
    Rest("comm.init_timeout_seconds", Why.DIFFERS, "launch.timeout_s holds for all of a run"),
    Rest("comm.*", Why.NONE),
    Rest("validation.*", Why.NEEDLESS),
    Rest("fault_tolerance.*", Why.NONE, "launch.max_restarts starts a run that failed again"),
    Rest("memory_estimation.*", Why.NONE, "`meshwright dryrun CONFIG` tells memory"),
    Rest("debug.*", Why.NONE),
    Rest("experimental.*", Why.NONE),
)
"""Rows for all keys that no code reads; the first match applies."""
