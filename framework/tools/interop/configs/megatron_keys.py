"""Tables of the Megatron-LM flags that no code reads: why they are not carried over."""

from __future__ import annotations

from meshwright.tools.interop.configs.shell import LAUNCHER
from meshwright.tools.interop.configs.translation import Rest, Why

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
    Rest(f"{LAUNCHER}*", Why.NEEDLESS),
    Rest("skipped.*", Why.BY_HAND, "it stands in a branch, loop or function of the script that is not followed here"),
    Rest("fp8*", Why.NONE, "there is no float8"),
    Rest("fp4*", Why.NONE, "there is no float4"),
    Rest("fp16*", Why.NONE, "there is no float16, which needs loss scaling"),
    Rest("*loss-scale*", Why.NONE, "bfloat16 needs no loss scaling"),
    Rest("hysteresis", Why.NONE, "bfloat16 needs no loss scaling"),
    Rest("grad-reduce-in-bf16", Why.DIFFERS, "gradients are summed in float32"),
    Rest("fp32-residual-connection", Why.NONE),
    Rest("context-parallel-size", Why.NONE, "there is no context parallelism"),
    Rest("cp-comm-type", Why.NONE, "there is no context parallelism"),
    Rest("expert-*", Why.NONE, "there is no expert parallelism"),
    Rest("moe-*", Why.NONE, "there is no mixture of experts"),
    Rest(
        "*rampup-batch-size", Why.NONE, "the batch has one size; a second run with a larger one goes on from the first"
    ),
    Rest("step-batch-size-schedule", Why.NONE, "the batch has one size; a second run with a larger one goes on"),
    Rest("decoupled-*", Why.NONE, "all weights have one learning rate"),
    Rest("start-weight-decay", Why.NONE, "the decay stays what it is"),
    Rest("end-weight-decay", Why.NONE, "the decay stays what it is"),
    Rest("weight-decay-incr-style", Why.NONE, "the decay stays what it is"),
    Rest("lr-warmup-init", Why.DIFFERS, "the first step has 1/warmup_steps of the highest rate"),
    Rest("init-method-std", Why.DIFFERS, "weights begin with 0.02, less at the ends of branches"),
    Rest("init-method-xavier-uniform", Why.DIFFERS, "weights begin with 0.02, less at the ends of branches"),
    Rest("split", Why.BY_HAND, "a pair of its own for data.validation"),
    Rest("*data-path", Why.BY_HAND, PREPARED),
    Rest("*data-args-path", Why.BY_HAND, PREPARED),
    Rest("mock-data", Why.BY_HAND, f"{PREPARED}; `meshwright data stdlib` makes one"),
    Rest("tokenizer-*", Why.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    Rest("vocab-file", Why.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    Rest("merge-file", Why.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    Rest("tiktoken-*", Why.BY_HAND, "data.tokenizer, a tokenizer.json's path; only `sample` reads it"),
    Rest("vocab-extra-ids", Why.BY_HAND, "model.options.vocab_size"),
    Rest("save", Why.NEEDLESS, "a run lives in run.directory/run.name; Megatron's checkpoints are not read"),
    Rest("load", Why.NEEDLESS, "the same command goes on; Megatron's checkpoints are not read"),
    Rest("pretrained-checkpoint", Why.BY_HAND, "weights of elsewhere are converted first"),
    Rest("finetune", Why.BY_HAND, "weights of elsewhere are converted first"),
    Rest("tensorboard-*", Why.NONE, "metrics.jsonl has every step; tracking.wandb sends it on"),
    Rest("*-to-tensorboard", Why.NONE, "metrics.jsonl has every step; tracking.wandb sends it on"),
    Rest("wandb-save-dir", Why.NEEDLESS, "RUN/wandb"),
    Rest("profile*", Why.NONE, "tracking.trace_step measures one step of each start; `meshwright draw RUN` shows it"),
    Rest("use-pytorch-profiler", Why.NONE, "tracking.trace_step measures one step of each start"),
    Rest("exit-*", Why.NONE, "USR2 or TERM ends a run after its step, saved; `meshwright slurm` sends it in time"),
    Rest("recompute-*", Why.NONE),
    Rest("optimizer-offload-fraction", Why.DIFFERS, "parallel.offload moves all of it"),
    Rest("microbatch-group-size-per-virtual-pipeline-stage", Why.NONE, "groups of pp, as the paper has it"),
    Rest("pipeline-model-parallel-layout", Why.BY_HAND, "pipeline.balance, as numbers of layers"),
    Rest("pipeline-model-parallel-split-rank", Why.NONE),
    Rest("use-tp-pp-dp-mapping", Why.NONE, "tp is innermost and pp outermost always, as with this flag"),
    Rest("deterministic-mode", Why.NEEDLESS),
    Rest("eval-*", Why.NEEDLESS, "there is no validation text"),
    Rest("calculate-per-token-loss", Why.NEEDLESS, "the loss is of tokens always"),
    Rest(
        "apply-layernorm-1p", Why.NEEDLESS, "the same function, kept as 1 + weight: it matters to Megatron's files only"
    ),
    Rest("hierarchical-context-parallel-sizes", Why.NONE, "there is no context parallelism"),
    *(Rest(pattern, Why.NEEDLESS) for pattern in NEEDLESS.split()),
)
"""Rows for all flags that no code reads; the first match applies."""
