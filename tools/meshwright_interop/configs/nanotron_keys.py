"""Tables of nanotron's keys: features without a counterpart, and keys without a translation, with the reason."""

from __future__ import annotations

from meshwright_interop.configs.source_keys import (
    CORPUS,
    HALVES,
    TOKENIZER,
    TRACING,
    DropReason,
    DropRule,
)

CONFIG = "model.model_config"
FACTORY = "optimizer.optimizer_factory"
RATE = "optimizer.learning_rate_scheduler"
SCHEDULES = {"1f1b": "1f1b", "afab": "gpipe"}
NOT_LLAMA = {
    "no_rope_layer": "layers without positions",
    "moe_config": "mixture of experts",
}
"""Key of a feature that no model here has -> the feature; accepted if it is off."""
GATES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}
"""Activation of the gate -> option ``mlp`` of meshwright_models.decoder."""
Z_LOSS = (
    "nanotron squares the logsumexp of the logits less the largest of them, here that of the logits, as in PaLM, which "
    "its comment names"
)
REST = (
    DropRule("data.*", DropReason.BY_HAND, CORPUS),
    DropRule("s3_upload*", DropReason.NONE, "checkpoints stay in the run directory"),
    DropRule("model.init_method.*", DropReason.NEEDLESS),
    DropRule(
        "model.make_vocab_size_divisible_by", DropReason.NEEDLESS, "the vocabulary is padded for tp automatically"
    ),
    DropRule(f"{CONFIG}.*_token_id", DropReason.NEEDLESS, "the corpus stores its end-of-document token"),
    DropRule(f"{CONFIG}.rope_interleaved", DropReason.DIFFERS, HALVES),
    DropRule(f"{CONFIG}.flex_attention_mask", DropReason.BY_HAND, "data.document_boundaries separates documents"),
    DropRule("optimizer.accumulate_grad_in_fp32", DropReason.DIFFERS, "gradients are accumulated in float32"),
    DropRule("parallelism.expert_parallel_size", DropReason.NONE, "experts are not imported"),
    DropRule("profiler*", DropReason.NONE, TRACING),
    DropRule("tokenizer.tokenizer_name_or_path", DropReason.BY_HAND, TOKENIZER),
    DropRule("checkpoints.save_initial_state lighteval* tokens.limit_test_batches", DropReason.NONE),
    DropRule(
        f"""checkpoints.* general.* logging.* metrics_logging* {FACTORY}.* parallelism.* tokenizer.*
        {CONFIG}.initializer_range {CONFIG}.pretraining_tp {CONFIG}.use_cache {CONFIG}._attn_implementation
        {CONFIG}._fused_* {CONFIG}._use_qkv_packed {CONFIG}.log_attn_probs""",
        DropReason.NEEDLESS,
    ),
)
"""Rows for all keys without a translation; the first match applies."""
