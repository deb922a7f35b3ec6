"""Tables of torchtitan's keys: moved ones, those that become one key here, and those without a
translation.
"""

from __future__ import annotations

from meshwright_interop.configs.source_keys import (
    BALANCE,
    CORPUS,
    FLOAT8,
    METRICS,
    PRETRAINED,
    TRACING,
    DropReason,
    KeyRule,
    Refusal,
    rules,
)
from meshwright_interop.configs.translation import Row, Translation

count, number = Translation.count, Translation.number
integer, boolean, text = Translation.integer, Translation.boolean, Translation.text

MOVED = {
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.tokenizer_path": "model.hf_assets_path",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "validation.enabled": "validation.enable",
}
"""Old name of a key -> its name in the last version with TOML files."""
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved_1f1b",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipe_v",
}
NEAREST = {"interleavedzerobubble": "interleaved_1f1b", "loopedbfs": "interleaved_1f1b"}
"""Schedule of several stages per rank that is not supported -> the nearest one; of others 1f1b."""
SEVERAL_STAGES = {*SCHEDULES, *NEAREST} - {"1f1b", "gpipe"}
SWITCHES = {
    "profiling": "profiling.enable_profiling",
    "quantize": "model.converters",
    "compile": "compile.enable",
    "fault_tolerance": "fault_tolerance.enable",
    "memory_estimation": "memory_estimation.enable",
    "validation": "validation.enable",
    "checkpoint": "checkpoint.enable",
}
"""Section -> the key that enables it; without it the others of the section have no effect."""

LAYOUT = (
    Row("parallelism.tensor_parallel_degree", "parallel.tp", count, 1),
    Row("parallelism.pipeline_parallel_degree", "parallel.pp", count, 1),
    Row("parallelism.context_parallel_degree", "parallel.cp", count, 1, unless=1),
)
OPTIMIZER = (
    Row("optimizer.lr", "optimizer.learning_rate", number, 8e-4),
    Row("training.max_norm", "optimizer.clip_norm", number, 1.0),
    Row("training.steps", "train.steps", count, 10000),
)
SERVICES = (
    Row("training.seq_len", "data.sequence_length", count, 2048),
    Row("debug.seed", "run.seed", integer),
    Row("job.dump_folder", "run.directory", text, "./outputs"),
    Row("metrics.log_freq", "tracking.log_every", count, 10),
    Row(
        "metrics.enable_wandb",
        "tracking.wandb",
        boolean,
        False,
        lambda is_on: "auto" if is_on else None,
    ),
    Row("comm.train_timeout_seconds", "launch.timeout_s", number),
    Row("compile.enable", "train.compile", boolean, False, unless=False),
)
MOVED_2024 = """
    training.batch_size training.warmup_steps training.*_parallel_degree
    training.data_parallel_degree experimental.pipeline_parallel_*
    experimental.context_parallel_degree
"""
NEEDLESS = """
    checkpoint.folder checkpoint.interval_type checkpoint.initial_load* checkpoint.load*
    parallelism.context_parallel_* parallelism.enable_sequence_parallel metrics.* model.*
    optimizer.fused optimizer.implementation training.dataloader.* training.gc_* validation.*
    training.mixed_precision_reduce
"""
RULES = (
    KeyRule(
        "model_spec.*",
        Refusal.MODEL,
        "a tree of modules; give its sizes by the model.name and model.flavor of the TOML",
    ),
    *rules(
        Refusal.RECIPE,
        {
            MOVED_2024: "a name of 2024, which has moved: write the key as the newest TOML has it",
            "checkpoint.initial_load_path checkpoint.initial_load_in_hf": PRETRAINED,
        },
    ),
    *rules(
        DropReason.BY_HAND,
        {
            "training.dataset_path": CORPUS,
            "model.converters float8.* quantize.* training.fp8_linear": FLOAT8,
            "parallelism.pipeline_parallel_schedule_csv": "pipeline.schedule_file, in its own format",
            "parallelism.pipeline_parallel_split_points": BALANCE,
            "parallelism.module_fqns_per_model_part": BALANCE,
        },
    ),
    *rules(
        DropReason.DIFFERS,
        {
            "parallelism.pipeline_parallel_*_stage_less_layers": BALANCE,
            "comm.init_timeout_seconds": "launch.timeout_s applies to the whole run",
        },
    ),
    *rules(
        DropReason.NONE,
        {
            "job.description experimental.* debug.* job.* comm.* activation_checkpoint.*": "",
            "profiling.*": TRACING,
            "metrics.enable_tensorboard": METRICS,
            "optimizer.early_step_in_backward": "clipping needs all gradients",
            "mx.*": "no MXFP8",
            "parallelism.*expert_*": "experts are not imported",
            "*.disable_loss_parallel": "the loss is always vocabulary-parallel",
            "parallelism.enable_async_* parallelism.enable_approx_*": "",
            "compile.*": "train.compile compiles each layer separately",
            "fault_tolerance.*": "launch.max_restarts restarts a failed run",
            "memory_estimation.*": "`meshwright dryrun CONFIG` estimates memory",
        },
    ),
    KeyRule(NEEDLESS, DropReason.NEEDLESS),
    KeyRule("checkpoint.*", DropReason.NONE, "a checkpoint always has the full state"),
)
"""Rules for all keys without a translation; the first that matches applies."""
