"""Tables of the Megatron-LM flags without a translation, with the reason to drop them."""

from __future__ import annotations

from meshwright_interop.configs.flags import LAUNCHER
from meshwright_interop.configs.source_keys import (
    BALANCE,
    FLOAT8,
    METRICS,
    PRETRAINED,
    TOKENIZER,
    TRACING,
    DropReason,
    DropRule,
)

INDEXED_CORPUS = "data.train, the path of a .bin/.idx pair without the suffix"
NEEDLESS = """
    use-mcore-models transformer-impl attention-backend use-flash-attn *-fusion cross-entropy-fusion-impl
    overlap-* *-overlap* tp-comm-* disable-tp-comm-* defer-embedding-wgrad-compute wgrad-deferral-limit ddp-*
    manual-gc* no-manual-gc-eval empty-unused-memory-level cuda-graph-* enable-cuda-graph te-rng-tracker
    distributed-backend local-rank lazy-mpu-init disable-gloo-process-groups high-priority-stream-groups use-nccl-ub
    no-overlap-p2p-communication no-scatter-gather-tensors-in-pipeline no-async-tensor-model-parallel-allreduce
    account-for-* no-align-* no-persist-layer-norm use-cpu-initialization init-model-with-meta-device no-initialization
    log-* no-log-* timing-log-* no-barrier-with-level-1-timing logging-level no-one-logger disable-straggler-on-startup
    no-check-for-nan-in-loss-and-grad ckpt-* no-ckpt-* dist-ckpt-* auto-detect-ckpt-format async-save
    no-load-* no-save-* use-persistent-ckpt-worker use-checkpoint-* override-opt_param-scheduler
    override-opt-param-scheduler num-workers data-cache-path num-dataset-builder-threads dataloader-type
    no-mmap-bin-files no-create-attention-mask-in-dataloader no-data-sharding no-use-* no-pin-*
    apply-query-key-layer-scaling attention-softmax-in-fp32
    accumulate-allreduce-grads-in-fp32
"""
"""Patterns of flags that affect only the speed or the logging of Megatron-LM: nothing is lost without them."""
REST = (
    DropRule(f"{LAUNCHER}*", DropReason.NEEDLESS),
    DropRule("fp8* first-last-layers-bf16 num-layers-at-*-in-bf16", DropReason.BY_HAND, FLOAT8),
    DropRule("fp4*", DropReason.NONE, "no float4"),
    DropRule("make-vocab-size-divisible-by", DropReason.DIFFERS, "padded rows take no part in the softmax here"),
    DropRule("fp16-lm-cross-entropy", DropReason.DIFFERS, "the loss is computed in float32"),
    DropRule("*loss-scale* hysteresis", DropReason.NEEDLESS, "without --fp16"),
    DropRule("grad-reduce-in-bf16", DropReason.DIFFERS, "gradients are summed in float32"),
    DropRule("hierarchical-context-parallel-sizes", DropReason.NONE, "context-parallel exchanges have one level"),
    DropRule("expert-*", DropReason.NONE, "experts are not imported"),
    DropRule("moe-*", DropReason.NEEDLESS, "without --num-experts"),
    DropRule("lr-warmup-init", DropReason.NEEDLESS),
    DropRule("split", DropReason.BY_HAND, "data.validation, the path of a separate .bin/.idx pair"),
    DropRule("*data-path *data-args-path", DropReason.BY_HAND, INDEXED_CORPUS),
    DropRule("mock-data", DropReason.BY_HAND, f"{INDEXED_CORPUS}; `meshwright data stdlib` makes one"),
    DropRule("tokenizer-* vocab-file merge-file tiktoken-*", DropReason.BY_HAND, TOKENIZER),
    DropRule("vocab-extra-ids", DropReason.BY_HAND, "model.options.vocab_size"),
    DropRule("save", DropReason.NEEDLESS, "a run lives in run.directory/run.name; Megatron's checkpoints are not read"),
    DropRule("load", DropReason.NEEDLESS, "the same command resumes; Megatron's checkpoints are not read"),
    DropRule("tensorboard-* *-to-tensorboard", DropReason.NONE, METRICS),
    DropRule("wandb-save-dir", DropReason.NEEDLESS, "RUN/wandb"),
    DropRule("profile* use-pytorch-profiler", DropReason.NONE, TRACING),
    DropRule(
        "exit-*",
        DropReason.NONE,
        "SIGUSR2 or SIGTERM saves after the current step and ends; `meshwright slurm` sends it in time",
    ),
    DropRule("optimizer-offload-fraction", DropReason.DIFFERS, "parallel.offload moves all of it"),
    DropRule(
        "microbatch-group-size-per-virtual-pipeline-stage", DropReason.NONE, "always pp micro-batches, as in the paper"
    ),
    DropRule("pipeline-model-parallel-layout", DropReason.BY_HAND, BALANCE),
    DropRule("use-tp-pp-dp-mapping", DropReason.NONE, "tp is always innermost and pp outermost, as with this flag"),
    DropRule("recompute-* fp32-residual-connection pipeline-model-parallel-split-rank", DropReason.NONE),
    DropRule("eval-*", DropReason.NEEDLESS, "no validation text"),
    DropRule("calculate-per-token-loss", DropReason.NEEDLESS, "the loss is always a mean over tokens"),
    DropRule(
        "apply-layernorm-1p",
        DropReason.NEEDLESS,
        "the same function, stored as 1 + weight: it only matters for Megatron's checkpoints",
    ),
    DropRule(f"deterministic-mode {NEEDLESS}", DropReason.NEEDLESS),
)
"""Rows for all flags without a translation; the first match applies."""

REFUSED = {
    "apply-wd-to-qk-layernorm": "norms are never decayed here",
    "no-weight-decay-cond-type": "biases and norms are never decayed here, everything else is",
    "head-lr-mult": "one learning rate for all weights here",
    "fim-data": "documents are not permuted for filling in the middle here",
    "sft": "the labels of a conversation are not masked here",
    "perform-rl-step": "no reinforcement learning",
    "logits-load-dir": "no distillation",
    "export-kd-teacher-load": "no distillation",
    "pretrained-checkpoint": PRETRAINED,
    "finetune": PRETRAINED,
    "freeze-all-layers": "all weights are trained here",
    "init-method-xavier-uniform": "weights are drawn from a normal distribution here",
    "embedding-init-method-std": "the embedding is initialised as other matrices are",
    "iterations-to-skip": "every step is trained here",
    "phase-transition-iterations": "one corpus for the whole run here",
}
"""Flags that change the training and have no counterpart -> the reason to refuse them."""
