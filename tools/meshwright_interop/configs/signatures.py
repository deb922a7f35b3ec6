"""Signatures of the supported formats: the keys by which a document is detected as one of theirs.

A suffix alone means nothing: most programs have YAML. A section counts if the document has it with one of the keys that
this framework has there and other programs rarely have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

Document = Mapping[str, Any]


class Signature(NamedTuple):
    """Distinctive keys of one supported format."""

    sections: Mapping[str, str]
    """Top-level section -> patterns of its distinctive keys."""
    min_sections: int
    """Number of sections with a distinctive key that a document needs."""
    alone: str = ""
    """Patterns of dotted keys; one is enough."""

    def matches(self, document: Document) -> bool:
        """Return True if the document is of this format."""
        if any(has_key(document, pattern) for pattern in self.alone.split()):
            return True
        found = [
            name
            for name, patterns in self.sections.items()
            if any(has_key(document, f"{name}.{pattern}") for pattern in patterns.split())
        ]
        return len(found) >= self.min_sections


def has_key(document: Document, dotted: str) -> bool:
    """Return True if the document has a key of this dotted pattern; a list counts as each of its tables."""
    name, _, below = dotted.partition(".")
    for key, value in document.items():
        if not fnmatchcase(str(key), name):
            continue
        tables = value if isinstance(value, list) else [value]
        if not below or any(has_key(table, below) for table in tables if isinstance(table, Mapping)):
            return True
    return False


NANOTRON = Signature(
    {
        "general": "run benchmark_csv_path consumed_train_samples ignore_sanity_checks",
        "parallelism": "dp pp_engine tp_mode tp_linear_async_communication expert_parallel_size recompute_layer",
        "tokens": "train_steps batch_accumulation_per_replica val_check_interval limit_val_batches limit_test_batches",
        "optimizer": "optimizer_factory learning_rate_scheduler zero_stage accumulate_grad_in_fp32",
        "checkpoints": "checkpoint_interval checkpoints_path checkpoints_path_is_shared_file_system",
        "model": "model_config ddp_bucket_cap_mb init_method make_vocab_size_divisible_by",
        "data_stages": "start_training_step",
        "tokenizer": "tokenizer_name_or_path tokenizer_max_length",
        "logging": "iteration_step_info_interval log_level_replica",
    },
    3,
    alone="model.model_config.is_*_config",
)

TORCHTITAN = Signature(
    {
        "job": "dump_folder config_file custom_config_module print_config print_args description",
        "model": "flavor hf_assets_path tokenizer_path converters print_after_conversion",
        "training": "*local_batch_size seq_len max_norm mixed_precision_* *_parallel_degree",
        "parallelism": "*_degree pipeline_parallel_* disable_loss_parallel fsdp_reshard_after_forward",
        "experimental": "pipeline_parallel_* context_parallel_* enable_async_tensor_parallel custom_import",
        "lr_scheduler": "decay_ratio decay_type min_lr_factor lr_min",
        "optimizer": "implementation early_step_in_backward",
        "activation_checkpoint": "mode selective_ac_option per_op_sac_* preserve_rng_state",
        "metrics": "log_freq save_tb_folder enable_tensorboard enable_color_printing",
        "profiling": "enable_profiling profile_freq save_traces_folder",
        "checkpoint": "enable_checkpoint enable model_weights_only async_mode initial_load_* last_save_*",
        "comm": "train_timeout_seconds init_timeout_seconds trace_buf_size",
        "compile": "components",
        "quantize": "linear grouped_mm",
    },
    2,
    alone="model.flavor training.local_batch_size parallelism.*_parallel_degree parallelism.data_parallel_*_degree",
)

BRIDGE = Signature(
    {
        "train": "train_iters train_samples rampup_batch_size exit_duration_in_mins manual_gc*",
        "model": "*_model_parallel_size num_query_groups ffn_hidden_size kv_channels layernorm_epsilon",
        "optimizer": "adam_beta1 adam_beta2 clip_grad use_distributed_optimizer lr_warmup_init",
        "scheduler": "lr_decay_style lr_decay_iters lr_warmup_iters lr_wsd_* *_weight_decay weight_decay_incr_style",
        "ddp": "use_distributed_optimizer grad_reduce_in_fp32 overlap_grad_reduce average_in_collective",
        "dist": "use_megatron_fsdp use_torch_fsdp2 distributed_backend use_gloo_process_groups",
        "checkpoint": "fully_parallel_save ckpt_format async_save dist_ckpt_* save_interval",
    },
    3,
)

MEGATRON_FLAGS = """
    num-attention-heads max-position-embeddings train-iters train-samples tensor-model-parallel-size
    pipeline-model-parallel-size context-parallel-size sequence-parallel ffn-hidden-size kv-channels num-query-groups
    group-query-attention lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters lr-warmup-samples
    lr-warmup-fraction eval-iters tokenizer-type vocab-file merge-file hidden-dropout attention-dropout init-method-std
    clip-grad adam-beta1 adam-beta2 use-distributed-optimizer overlap-grad-reduce position-embedding-type normalization
    untie-embeddings-and-output-weights use-mcore-models transformer-impl use-flash-attn recompute-granularity
    recompute-activations no-masked-softmax-fusion distributed-backend use-rotary-position-embeddings rotary-base
"""
"""Flags of Megatron-LM that other training scripts rarely have."""
MIN_MEGATRON_FLAGS = 2
REQUIRED_FLAGS = {"num-layers", "hidden-size", "num-attention-heads"}
"""Flags without which Megatron-LM does not start."""


def has_megatron_flags(keys: Collection[str]) -> bool:
    """Return True if flags without their dashes are Megatron-LM's."""
    return {*keys} >= REQUIRED_FLAGS or len(set(MEGATRON_FLAGS.split()) & {*keys}) >= MIN_MEGATRON_FLAGS


def is_bridge(document: Document) -> bool:
    """Return True for a ``run_config.yaml`` of Megatron-Bridge: its classes, or its fields."""
    return any(target.startswith("megatron.") for target in targets(document)) or BRIDGE.matches(document)


def targets(document: Document) -> Iterator[str]:
    """Yield the class names (``_target_``) of the top-level sections."""
    for section in document.values():
        target = section.get("_target_") if isinstance(section, Mapping) else None
        if isinstance(target, str):
            yield target


def is_megatron(document: Document) -> bool:
    """Return True for a ``model_config.yaml`` of Megatron-LM's functional tests: flags with their dashes."""
    arguments = document.get("MODEL_ARGS")
    return isinstance(arguments, Mapping) and any(str(key).startswith("--") for key in arguments)
