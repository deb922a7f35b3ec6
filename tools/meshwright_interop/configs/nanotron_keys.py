"""Tables of nanotron's keys: those that become one key here, and those without a translation."""

from __future__ import annotations

from typing import Any

from meshwright_interop.configs.source_keys import (
    CORPUS,
    HALVES,
    PRETRAINED,
    SPECTRAL_MUP,
    TOKENIZER,
    TRACING,
    DropReason,
    KeyRule,
    Refusal,
    rules,
)
from meshwright_interop.configs.translation import Row, Translation

CONFIG = "model.model_config"
FACTORY = "optimizer.optimizer_factory"
RATE = "optimizer.learning_rate_scheduler"
SCHEDULES = {"1f1b": "1f1b", "afab": "gpipe"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
GATES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}
"""Activation of the gate -> option ``mlp`` of meshwright_models.decoder."""
count, number = Translation.count, Translation.number
integer, boolean, text = Translation.integer, Translation.boolean, Translation.text


def _option(name: str, option: str, *rest: Any, **others: Any) -> Row:
    return Row(f"{CONFIG}.{name}", f"model.options.{option}", *rest, **others)


MODEL = (
    _option("vocab_size", "vocab_size", count, 32000),
    _option("hidden_size", "hidden_size", count, 4096),
    _option("num_hidden_layers", "num_layers", count, 32),
    _option("num_attention_heads", "num_heads", count, 32),
    _option("intermediate_size", "ffn_size", count, 11008),
    _option("max_position_embeddings", "max_sequence_length", count, 2048),
    _option("rope_theta", "rope_theta", number, 10000.0),
    _option("rms_norm_eps", "norm_eps", number, 1e-6),
    _option("tie_word_embeddings", "tied", boolean, False),
    _option("rope_scaling.factor", "rope_scaling_factor", number),
    _option("rope_scaling.low_freq_factor", "rope_low_freq_factor", number),
    _option("rope_scaling.high_freq_factor", "rope_high_freq_factor", number),
    _option("rope_scaling.original_max_position_embeddings", "rope_original_length", integer),
    Row("model.init_method.std", "model.options.init_std", number, 0.02, unless=0.02),
)
LAYOUT = (
    *(Row(f"parallelism.{axis}", f"parallel.{axis}", count, 1) for axis in ("dp", "pp", "tp")),
    Row("parallelism.context_parallel_size", "parallel.cp", count, 1, unless=1),
    Row("optimizer.zero_stage", "parallel.zero", integer, 0),
    Row(
        "model.ddp_bucket_cap_mb",
        "parallel.bucket_bytes",
        number,
        convert=lambda megabytes: int(megabytes * 2**20),
    ),
    Row(
        "parallelism.recompute_layer",
        "pipeline.recompute",
        boolean,
        False,
        lambda is_full: "full" if is_full else None,
    ),
    Row("tokens.micro_batch_size", "batch.micro_batch_size", count, 1),
    Row("tokens.batch_accumulation_per_replica", "batch.chunks", count, 1),
)
SERVICES = (
    Row("model.dtype", "train.dtype", text, "bfloat16", lambda dtype: DTYPES.get(dtype, dtype)),
    Row("general.seed", "run.seed", integer, 42),
    Row("general.project", "tracking.project", text),
    Row("checkpoints.checkpoint_interval", "checkpoint.every", count, 1000),
    Row("checkpoints.checkpoints_path", "run.directory", text, "checkpoints"),
    Row("logging.iteration_step_info_interval", "tracking.log_every", count, 1),
)
NEEDLESS = f"""
    checkpoints.* general.* logging.* metrics_logging* {FACTORY}.* parallelism.* tokenizer.*
    {CONFIG}.initializer_range {CONFIG}.pretraining_tp {CONFIG}.use_cache {CONFIG}._fused_*
    {CONFIG}._attn_implementation {CONFIG}._use_qkv_packed {CONFIG}.log_attn_probs
    {CONFIG}.*_token_id {CONFIG}.z_loss* model.init_method.* model.make_vocab_size_divisible_by
    doremi.*
"""
RULES = (
    *rules(
        Refusal.MODEL,
        {
            f"{CONFIG}.no_rope_layer": "layers without positions",
            f"{CONFIG}.moe_config*": "mixture of experts",
        },
    ),
    *rules(
        Refusal.RECIPE,
        {
            "model.init_method.use_mup": SPECTRAL_MUP,
            "model.init_method.path": PRETRAINED,
            "doremi.domain_names": "the weights of corpora are fixed here",
            "optimizer.weight_decay_exclude_named_params": "biases and norms alone are not decayed here",
        },
    ),
    KeyRule(
        "optimizer.accumulate_grad_in_fp32",
        DropReason.DIFFERS,
        "gradients are accumulated in float32",
        (True,),
    ),
    *rules(
        DropReason.BY_HAND,
        {
            f"{CONFIG}.flex_attention_mask": "data.document_boundaries separates documents",
            "data.*": CORPUS,
            "tokenizer.tokenizer_name_or_path": TOKENIZER,
        },
    ),
    KeyRule(f"{CONFIG}.rope_interleaved", DropReason.DIFFERS, HALVES),
    *rules(
        DropReason.NONE,
        {
            "s3_upload*": "checkpoints stay in the run directory",
            "parallelism.expert_parallel_size": "experts are not imported",
            "profiler*": TRACING,
            "checkpoints.save_initial_state lighteval* tokens.limit_test_batches": "",
        },
    ),
    KeyRule(NEEDLESS, DropReason.NEEDLESS),
)
"""Rules for all keys without a translation; the first that matches applies."""
