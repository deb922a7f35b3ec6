"""Tables of the Megatron-LM flags without a translation, with the reason to drop them."""

from __future__ import annotations

from meshwright.tools.interop.configs.shell import LAUNCHER
from meshwright.tools.interop.configs.translation import (
    BALANCE,
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
    make-vocab-size-divisible-by attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32
"""
"""Patterns of flags that affect only the speed or the logging of Megatron-LM: nothing is lost without them."""
REST = (
    DropRule(f"{LAUNCHER}*", DropReason.NEEDLESS),
    DropRule("skipped.*", DropReason.BY_HAND, "inside a branch, loop or function of the script that is not evaluated"),
    DropRule("fp8*", DropReason.NONE, "no float8"),
    DropRule("fp4*", DropReason.NONE, "no float4"),
    DropRule("fp16*", DropReason.NONE, "float16, which needs loss scaling, is not supported"),
    DropRule("*loss-scale* hysteresis", DropReason.NONE, "bfloat16 needs no loss scaling"),
    DropRule("grad-reduce-in-bf16", DropReason.DIFFERS, "gradients are summed in float32"),
    DropRule(
        "context-parallel-size hierarchical-context-parallel-sizes cp-comm-type",
        DropReason.NONE,
        "no context parallelism",
    ),
    DropRule("expert-*", DropReason.NONE, "no expert parallelism"),
    DropRule("moe-*", DropReason.NONE, "no mixture of experts"),
    DropRule(
        "*rampup-batch-size step-batch-size-schedule",
        DropReason.NONE,
        "the batch size is fixed; start a second run with a larger one from the first run's checkpoint",
    ),
    DropRule("decoupled-*", DropReason.NONE, "one learning rate for all weights"),
    DropRule(
        "start-weight-decay end-weight-decay weight-decay-incr-style", DropReason.NONE, "the weight decay is constant"
    ),
    DropRule("lr-warmup-init", DropReason.DIFFERS, "warm-up starts at 1/warmup_steps of the peak rate"),
    DropRule(
        "init-method-std init-method-xavier-uniform",
        DropReason.DIFFERS,
        "weights are initialised with std 0.02, less in each residual branch's last layer",
    ),
    DropRule("split", DropReason.BY_HAND, "data.validation, the path of a separate .bin/.idx pair"),
    DropRule("*data-path *data-args-path", DropReason.BY_HAND, INDEXED_CORPUS),
    DropRule("mock-data", DropReason.BY_HAND, f"{INDEXED_CORPUS}; `meshwright data stdlib` makes one"),
    DropRule("tokenizer-* vocab-file merge-file tiktoken-*", DropReason.BY_HAND, TOKENIZER),
    DropRule("vocab-extra-ids", DropReason.BY_HAND, "model.options.vocab_size"),
    DropRule("save", DropReason.NEEDLESS, "a run lives in run.directory/run.name; Megatron's checkpoints are not read"),
    DropRule("load", DropReason.NEEDLESS, "the same command resumes; Megatron's checkpoints are not read"),
    DropRule("pretrained-checkpoint finetune", DropReason.BY_HAND, PRETRAINED),
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
