"""Configuration names of Megatron-LM, torchtitan, nanotron and DeepSpeed, and their counterparts here.

The error for an unknown key is the only user. No key is accepted under a second name; only FSDP's four sharding
strategies are accepted as values. Case, dashes and underscores are ignored, so one line covers
``--tensor-model-parallel-size`` and ``tensor_model_parallel_size``. A dotted name is looked up whole first, then
without its leading sections. ``model.hidden_size`` is therefore found under ``hidden_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

_OPTIONS = "model.options, where the arguments of the model's builder go"
_BF16 = 'train.dtype = "bfloat16"'
NOTHING = "nothing yet"
"""Placeholder for features of other frameworks that do not exist here."""

_NAMES = {
    # the axes
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "tp_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "pp_size": "parallel.pp",
    "data_parallel_size": "parallel.dp",
    "data_parallel_replicate_degree": "parallel.dp divided by parallel.shard_factor",
    "data_parallel_shard_degree": "parallel.shard_factor (and parallel.zero for what is sharded over it)",
    "dp_size": "parallel.dp",
    "dp_replicate": "parallel.dp divided by parallel.shard_factor",
    "dp_shard": "parallel.shard_factor (and parallel.zero for what is sharded over it)",
    "sequence_parallel": "parallel.sequence",
    "enable_sequence_parallel": "parallel.sequence",
    "tp_linear_mode": "parallel.sequence",
    "use_distributed_optimizer": "parallel.zero = 1",
    "zero_stage": "parallel.zero",
    "zero_optimization.stage": "parallel.zero",
    "sharding_strategy": "parallel.zero",
    "fsdp_sharding_strategy": "parallel.zero",
    "reshard_after_forward": "parallel.zero = 3",
    "hsdp_shard_size": "parallel.shard_factor",
    "num_distributed_optimizer_instances": "parallel.shard_factor (parallel.dp divided by so many)",
    "mics_shard_size": "parallel.shard_factor",
    "zero_hpz_partition_size": "parallel.shard_factor",
    "reduce_bucket_size": "parallel.bucket_bytes",
    "ddp_bucket_size": "parallel.bucket_bytes",
    "ddp_bucket_cap_mb": "parallel.bucket_bytes",
    "pp_engine": "pipeline.schedule",
    "pipeline_parallel_schedule": "pipeline.schedule",
    "pipeline_schedule": "pipeline.schedule",
    "pipeline_parallel_split_points": "pipeline.balance",
    "module_fqns_per_model_part": "pipeline.balance",
    "pipeline_parallel_layers_per_stage": "pipeline.balance",
    "pipeline_model_parallel_layout": "pipeline.balance",
    "decoder_first_pipeline_num_layers": "pipeline.balance",
    "decoder_last_pipeline_num_layers": "pipeline.balance",
    "context_parallel_size": NOTHING,
    "context_parallel_degree": NOTHING,
    "cp": NOTHING,
    "ep": NOTHING,
    "expert_model_parallel_size": NOTHING,
    "expert_parallel_size": NOTHING,
    "expert_parallel_degree": NOTHING,
    # the batch
    "micro_batch_size": "batch.micro_batch_size",
    "micro_batch": "batch.micro_batch_size",
    "mbs": "batch.micro_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "per_device_train_batch_size": "batch.micro_batch_size",
    "pipeline_parallel_microbatch_size": "batch.micro_batch_size",
    "local_batch_size": "batch.micro_batch_size (in a pipeline: batch.micro_batch_size x batch.chunks)",
    "training.batch_size": "batch.micro_batch_size (in a pipeline: batch.micro_batch_size x batch.chunks)",
    "global_batch_size": "batch.global_batch",
    "gbs": "batch.global_batch",
    "train_batch_size": "batch.global_batch",
    "num_microbatches": "batch.chunks",
    "num_pp_microbatches": "batch.chunks",
    "pipeline_parallel_microbatches": "batch.chunks",
    "gradient_accumulation_steps": "batch.chunks",
    "batch_accumulation_per_replica": "batch.chunks",
    # data
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "max_context_length": "data.sequence_length",
    "tokens.sequence_length": "data.sequence_length",
    "data_path": "data.train",
    "train_data_path": "data.train",
    "dataset_path": "data.train",
    "dataset_folder": "data.train",
    "valid_data_path": "data.validation",
    "tokenizer_model": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "tokenizer_name_or_path": "data.tokenizer",
    "hf_assets_path": "data.tokenizer",
    "vocab_file": "data.tokenizer",
    "merge_file": "data.tokenizer",
    # optimizer
    "lr": "optimizer.learning_rate",
    "min_lr": "optimizer.min_learning_rate",
    "min_decay_lr": "optimizer.min_learning_rate",
    "min_lr_factor": "optimizer.min_learning_rate (a learning rate, not a share of the highest)",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "warmup_num_steps": "optimizer.warmup_steps",
    "warmup_iters": "optimizer.warmup_steps",
    "lr_scheduler.warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_fraction": "optimizer.warmup_steps (in steps, not a share)",
    "lr_decay_style": "optimizer.schedule",
    "decay_type": "optimizer.schedule",
    "lr_wsd_decay_iters": "optimizer.decay_steps",
    "lr_decay_iters": "optimizer.decay_until",
    "lr_decay_steps": "optimizer.decay_until",
    "decay_ratio": "optimizer.decay_steps for wsd (in steps, not a share)",
    "adam_beta1": "optimizer.betas, both in a list",
    "adam_beta2": "optimizer.betas, both in a list",
    "beta1": "optimizer.betas, both in a list",
    "beta2": "optimizer.betas, both in a list",
    "adam_eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "clip_grad": "optimizer.clip_norm",
    "max_norm": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    # training
    "train_iters": "train.steps",
    "train_steps": "train.steps",
    "training_steps": "train.steps",
    "max_steps": "train.steps",
    "training.steps": "train.steps",
    "bf16": _BF16,
    "bf16.enabled": _BF16,
    "mixed_precision_param": "train.dtype",
    "params_dtype": "train.dtype",
    "torch_dtype": "train.dtype",
    "fp16": f"{_BF16} (there is no float16: it needs loss scaling)",
    "fp16.enabled": f"{_BF16} (there is no float16: it needs loss scaling)",
    "compile.enable": "train.compile",
    "torch_compile": "train.compile",
    "eval_interval": "train.validate_every",
    "val_check_interval": "train.validate_every",
    "validation.freq": "train.validate_every",
    "eval_iters": "train.validate_steps",
    "limit_val_batches": "train.validate_steps",
    "validation.steps": "train.validate_steps",
    "seed": "run.seed",
    "exp_name": "run.name",
    "run_name": "run.name",
    "general.run": "run.name",
    # checkpoints, tracking, launch
    "save": "run.directory",
    "load": "run.directory: the same command again resumes",
    "dump_folder": "run.directory",
    "checkpoints_path": "run.directory",
    "resume_checkpoint_path": "run.directory: the same command again resumes",
    "save_interval": "checkpoint.every",
    "checkpoint_interval": "checkpoint.every",
    "checkpoint.interval": "checkpoint.every",
    "keep_latest_k": "checkpoint.keep_last",
    "log_interval": "tracking.log_every",
    "log_freq": "tracking.log_every",
    "steps_per_print": "tracking.log_every",
    "iteration_step_info_interval": "tracking.log_every",
    "wandb_project": "tracking.project",
    "general.project": "tracking.project",
    "wandb_exp_name": "run.name",
    "enable_wandb": "tracking.wandb",
    "distributed_timeout_minutes": "launch.timeout_s",
    "train_timeout_seconds": "launch.timeout_s",
    "init_timeout_seconds": "launch.timeout_s",
    "nproc_per_node": "launch.processes",
    "max_restarts": "launch.max_restarts",
    "devices": "launch.devices",
    "gpu_ids": "launch.devices",
    "omp_num_threads": "launch.threads",
    # the model's own arguments
    "num_layers": _OPTIONS,
    "num_hidden_layers": _OPTIONS,
    "hidden_size": _OPTIONS,
    "ffn_hidden_size": _OPTIONS,
    "intermediate_size": _OPTIONS,
    "num_attention_heads": _OPTIONS,
    "num_query_groups": _OPTIONS,
    "num_key_value_heads": _OPTIONS,
    "group_query_attention": _OPTIONS,
    "max_position_embeddings": _OPTIONS,
    "vocab_size": _OPTIONS,
    "hidden_dropout": _OPTIONS,
    "attention_dropout": _OPTIONS,
    "rotary_base": _OPTIONS,
    "untie_embeddings_and_output_weights": _OPTIONS,
}

_VALUES = {
    "fp32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "double": "float64",
    "bf16": "bfloat16",
    "gpu": "cuda",
    "disabled": "off",
    "none": "off",
    "onefoneb": "1f1b",
    "warmupstabledecay": "wsd",
}


SHARDING = MappingProxyType({"noshard": 0, "shardgradop": 2, "fullshard": 3, "hybridshard": 3})
"""FSDP's sharding strategies, folded -> ``parallel.zero``. The only foreign values accepted; a note is printed for
each."""


def fold(name: str) -> str:
    """Return a name in lower case without dashes and underscores, for comparison. Dots are kept."""
    return name.lower().replace("-", "").replace("_", "")


FAMILIAR = MappingProxyType({fold(name): own_name_of for name, own_name_of in _NAMES.items()})
"""Folded foreign name -> text for the error message. Most texts begin with a key of this schema; some are sentences."""

FAMILIAR_VALUES = MappingProxyType(_VALUES)
"""Folded foreign value -> value in this schema."""


def own_name_of(path: Sequence[str]) -> str | None:
    """Return the counterpart of a foreign key, e.g. ``("parallelism", "tensor_parallel_degree")`` -> "parallel.tp"."""
    for start in range(len(path)):
        found = FAMILIAR.get(fold(".".join(path[start:])))
        if found is not None:
            return found
    return None
