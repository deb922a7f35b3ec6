"""Tables of the Megatron-LM flags that no code reads: why they are not carried over."""

from __future__ import annotations

from meshwright.tools.interop.configs.shell import LAUNCHER
from meshwright.tools.interop.configs.translation import DropReason, DropRule

PREPARED = "data.train, the path of a .bin/.idx pair without the suffix"
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
    DropRule(
        "skipped.*",
        DropReason.BY_HAND,
        "it stands in a branch, loop or function of the script that is not followed here",
    ),
    DropRule("fp8*", DropReason.NONE, "there is no float8"),
    DropRule("fp4*", DropReason.NONE, "there is no float4"),
    DropRule("fp16*", DropReason.NONE, "there is no float16, which needs loss scaling"),
    DropRule("*loss-scale*", DropReason.NONE, "bfloat16 needs no loss scaling"),
    DropRule("hysteresis", DropReason.NONE, "bfloat16 needs no loss scaling"),
    DropRule("grad-reduce-in-bf16", DropReason.DIFFERS, "gradients are summed in float32"),
    DropRule("fp32-residual-connection", DropReason.NONE),
    DropRule("context-parallel-size", DropReason.NONE, "there is no context parallelism"),
    DropRule("cp-comm-type", DropReason.NONE, "there is no context parallelism"),
    DropRule("expert-*", DropReason.NONE, "there is no expert parallelism"),
    DropRule("moe-*", DropReason.NONE, "there is no mixture of experts"),
    DropRule(
        "*rampup-batch-size",
        DropReason.NONE,
        "the batch has one size; a second run with a larger one goes on from the first",
    ),
    DropRule(
        "step-batch-size-schedule", DropReason.NONE, "the batch has one size; a second run with a larger one goes on"
    ),
    DropRule("decoupled-*", DropReason.NONE, "all weights have one learning rate"),
    DropRule("start-weight-decay", DropReason.NONE, "the decay stays what it is"),
    DropRule("end-weight-decay", DropReason.NONE, "the decay stays what it is"),
    DropRule("weight-decay-incr-style", DropReason.NONE, "the decay stays what it is"),
    DropRule("lr-warmup-init", DropReason.DIFFERS, "the first step has 1/warmup_steps of the highest rate"),
    DropRule("init-method-std", DropReason.DIFFERS, "weights begin with 0.02, less at the ends of branches"),
    DropRule("init-method-xavier-uniform", DropReason.DIFFERS, "weights begin with 0.02, less at the ends of branches"),
    DropRule("split", DropReason.BY_HAND, "a pair of its own for data.validation"),
    DropRule("*data-path", DropReason.BY_HAND, PREPARED),
    DropRule("*data-args-path", DropReason.BY_HAND, PREPARED),
    DropRule("mock-data", DropReason.BY_HAND, f"{PREPARED}; `meshwright data stdlib` makes one"),
    DropRule("tokenizer-*", DropReason.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    DropRule("vocab-file", DropReason.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    DropRule("merge-file", DropReason.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    DropRule("tiktoken-*", DropReason.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    DropRule("vocab-extra-ids", DropReason.BY_HAND, "model.options.vocab_size"),
    DropRule("save", DropReason.NEEDLESS, "a run lives in run.directory/run.name; Megatron's checkpoints are not read"),
    DropRule("load", DropReason.NEEDLESS, "the same command goes on; Megatron's checkpoints are not read"),
    DropRule("pretrained-checkpoint", DropReason.BY_HAND, "weights of elsewhere are converted first"),
    DropRule("finetune", DropReason.BY_HAND, "weights of elsewhere are converted first"),
    DropRule("tensorboard-*", DropReason.NONE, "metrics.jsonl has every step; tracking.wandb sends it on"),
    DropRule("*-to-tensorboard", DropReason.NONE, "metrics.jsonl has every step; tracking.wandb sends it on"),
    DropRule("wandb-save-dir", DropReason.NEEDLESS, "RUN/wandb"),
    DropRule(
        "profile*",
        DropReason.NONE,
        "tracking.trace_step measures one step of each start; `meshwright draw RUN` shows it",
    ),
    DropRule("use-pytorch-profiler", DropReason.NONE, "tracking.trace_step measures one step of each start"),
    DropRule(
        "exit-*", DropReason.NONE, "USR2 or TERM ends a run after its step, saved; `meshwright slurm` sends it in time"
    ),
    DropRule("recompute-*", DropReason.NONE),
    DropRule("optimizer-offload-fraction", DropReason.DIFFERS, "parallel.offload moves all of it"),
    DropRule("microbatch-group-size-per-virtual-pipeline-stage", DropReason.NONE, "groups of pp, as the paper has it"),
    DropRule("pipeline-model-parallel-layout", DropReason.BY_HAND, "pipeline.balance, as numbers of layers"),
    DropRule("pipeline-model-parallel-split-rank", DropReason.NONE),
    DropRule("use-tp-pp-dp-mapping", DropReason.NONE, "tp is innermost and pp outermost always, as with this flag"),
    DropRule("deterministic-mode", DropReason.NEEDLESS),
    DropRule("eval-*", DropReason.NEEDLESS, "there is no validation text"),
    DropRule("calculate-per-token-loss", DropReason.NEEDLESS, "the loss is of tokens always"),
    DropRule(
        "apply-layernorm-1p",
        DropReason.NEEDLESS,
        "the same function, kept as 1 + weight: it matters to Megatron's files only",
    ),
    DropRule("hierarchical-context-parallel-sizes", DropReason.NONE, "there is no context parallelism"),
    *(DropRule(pattern, DropReason.NEEDLESS) for pattern in NEEDLESS.split()),
)
"""Rows for all flags that no code reads; the first match applies."""
