"""Tables of Megatron-LM's flags: those that become one key here, and those without a translation."""

from __future__ import annotations

from operator import not_

from meshwright_interop.configs.flags import LAUNCHER
from meshwright_interop.configs.source_keys import (
    BALANCE,
    FLOAT8,
    HALVES,
    METRICS,
    PRETRAINED,
    TOKENIZER,
    TRACING,
    DropReason,
    KeyRule,
    Refusal,
    rules,
)
from meshwright_interop.configs.translation import Row, Translation

count, number = Translation.count, Translation.number
integer, boolean, label = Translation.integer, Translation.boolean, Translation.label

MODEL = (
    Row("hidden-size", "model.options.hidden_size", count),
    Row("num-layers", "model.options.num_layers", count),
    Row("num-attention-heads", "model.options.num_heads", count),
    Row("norm-epsilon", "model.options.norm_eps", number, 1e-5),
    Row("untie-embeddings-and-output-weights", "model.options.tied", boolean, False, not_),
    Row("hidden-dropout", "model.options.dropout", number, 0.1),
    Row("init-method-std", "model.options.init_std", number, 0.02, unless=0.02),
    Row("qk-layernorm", "model.options.qk_norm", boolean, False, unless=False),
)
ROTARY = (
    Row("rotary-base", "model.options.rope_theta", number, 10000.0),
    Row("rotary-percent", "model.options.rotary_share", number, unless=1),
    Row(
        "rotary-seq-len-interpolation-factor", "model.options.rope_interpolation", number, unless=1
    ),
)
LAYOUT = (
    Row("tensor-model-parallel-size", "parallel.tp", count, 1),
    Row("pipeline-model-parallel-size", "parallel.pp", count, 1),
    Row("optimizer-cpu-offload", "parallel.offload", boolean, False, unless=False),
    Row("ddp-bucket-size", "parallel.bucket_bytes", count, convert=lambda numel: 4 * numel),
)
OPTIMIZER = (
    Row("weight-decay", "optimizer.weight_decay", number, 0.01),
    Row("clip-grad", "optimizer.clip_norm", number, 1.0),
)
LOSS_SCALE = (
    Row("initial-loss-scale", "loss_scale.initial", number),
    Row("min-loss-scale", "loss_scale.minimum", number),
    Row("loss-scale-window", "loss_scale.window", count),
    Row("hysteresis", "loss_scale.hysteresis", count),
)
SERVICES = (
    Row("seed", "run.seed", integer, 1234),
    Row("log-interval", "tracking.log_every", count, 100),
    Row(
        "distributed-timeout-minutes",
        "launch.timeout_s",
        number,
        convert=lambda minutes: 60 * minutes,
    ),
    Row("wandb-project", "tracking.project", label, unless=""),
    Row(
        "wandb-exp-name",
        "run.name",
        label,
        convert=lambda name: Translation.run_name(name) if name else None,
    ),
    Row("check-weight-hash-across-dp-replicas-interval", "watch.drift_every", integer),
)

INDEXED_CORPUS = "data.train, the path of a .bin/.idx pair without the suffix"
MULTIMODAL = """
    language-model-type vision-* img-h img-w patch-dim pixel-shuffle max-num-tiles use-tiling
    use-thumbnail use-tile-tags freeze-lm freeze-vit freeze-LM freeze-ViT image-tag-type
    num-frames disable-vision-class-token add-class-token dataset-config prompt-path audio-*
    sound-* allow-missing-vision-projection-checkpoint decoder-seq-length
    language-model-checkpoint
"""
MODELS = (
    *rules(
        Refusal.MODEL,
        {
            "num-experts": "mixture of experts",
            "multi-latent-attention": "multi-latent attention",
            "mtp-use-repeated-layer": "one module of multi-token prediction for all depths",
            "quick-geglu": "a GELU with gates",
            "hybrid-*-pattern heterogeneous-layers-config-*": "layers of several kinds",
            "linear-attention-freq": "linear attention",
            "experimental-attention-variant": "another kind of attention",
            "attention-output-gate": "a gate after the attention",
            "softmax-scale": "another scale of the attention's softmax",
            "apply-residual-connection-post-layernorm": "residuals taken after the norm",
            "window-attn-skip-freq": "a sliding window in some layers only",
            "no-rope-freq": "layers without positions",
            "qk-l2-norm": "an L2 norm of q and k without weights",
            "qk-clip": "clipped logits of the attention",
            "glu-linear-offset": "an offset in its gates",
            "activation-func-clamp-value": "clamped activations",
            "enable-mhc-connections": "several residual streams",
            "relative-attention-num-buckets": "relative positions",
            "encoder-num-layers": "an encoder in Megatron-LM's form",
            "spec": "custom layers",
            "bert-*": "the training of BERT",
            MULTIMODAL: "images, sound or several encoders",
        },
    ),
    KeyRule("model-provider", Refusal.MODEL, "the architecture of another program", ("gpt",)),
)
"""Flags of models that no builder makes; ``spec`` names code."""
RECIPES = (
    *rules(
        Refusal.RECIPE,
        {
            "use-mup": "muP is set by hand: model.options.mup_*, docs/models.md#mup",
            "apply-wd-to-qk-layernorm": "norms are never decayed here",
            "no-weight-decay-cond-type": "biases and norms alone are never decayed here",
            "head-lr-mult": "one learning rate for all weights here",
            "decoupled-lr": "a rate of its own is a factor here: model.parameter_groups",
            "step-batch-size-schedule": "a batch grows by equal increments here: batch.ramp",
            "fim-data": "documents are not permuted for filling in the middle here",
            "sft": "the labels of a conversation are not masked here",
            "perform-rl-step": "no reinforcement learning",
            "logits-load-dir export-kd-teacher-load": "no distillation",
            "pretrained-checkpoint finetune": PRETRAINED,
            "freeze-all-layers": "all weights are trained here",
            "init-method-xavier-uniform": "weights are drawn from a normal distribution here",
            "embedding-init-method-std": "the embedding is initialised as other matrices are",
            "iterations-to-skip": "every step is trained here",
            "phase-transition-iterations": "one corpus for the whole run here",
        },
    ),
    KeyRule("weight-decay-incr-style", Refusal.RECIPE, "the decay is constant here", ("constant",)),
    KeyRule("lr-warmup-init", Refusal.RECIPE, "warm-up starts at peak / warmup_steps", ("0.0",)),
)
"""Flags that change the training and have no counterpart."""
LISTED = (
    *rules(
        DropReason.BY_HAND,
        {
            "fp8* first-last-layers-bf16 num-layers-at-*-in-bf16": FLOAT8,
            "split": "data.validation, the path of a separate .bin/.idx pair",
            "*data-path *data-args-path": INDEXED_CORPUS,
            "mock-data": f"{INDEXED_CORPUS}; `meshwright data stdlib` makes one",
            "tokenizer-* vocab-file merge-file tiktoken-*": TOKENIZER,
            "vocab-extra-ids": "model.options.vocab_size",
            "decoder-*-pipeline-num-layers pipeline-model-parallel-layout": BALANCE,
        },
    ),
    *rules(
        DropReason.DIFFERS,
        {
            "rotary-interleaved": HALVES,
            "make-vocab-size-divisible-by": "padded rows take no part in the softmax here",
            "fp16-lm-cross-entropy": "the loss is computed in float32",
            "grad-reduce-in-bf16": "gradients are summed in float32",
            "optimizer-offload-fraction": "parallel.offload moves all of it",
        },
    ),
    *rules(
        DropReason.NONE,
        {
            "fp4*": "no float4",
            "hierarchical-context-parallel-sizes": "cp exchanges have one level",
            "expert-*": "experts are not imported",
            "tensorboard-* *-to-tensorboard": METRICS,
            "profile* use-pytorch-profiler": TRACING,
            "exit-*": "SIGUSR2 or SIGTERM saves and ends; `meshwright slurm` sends it",
            "microbatch-group-size-per-virtual-pipeline-stage": "always pp micro-batches",
            "use-tp-pp-dp-mapping": "tp is always innermost, pp outermost, as with it",
            "recompute-* fp32-residual-connection pipeline-model-parallel-split-rank": "",
        },
    ),
)
NEEDLESS = f"""
    {LAUNCHER}* calculate-per-token-loss apply-layernorm-1p deterministic-mode
    use-mcore-models transformer-impl attention-backend use-flash-attn *-fusion
    cross-entropy-fusion-impl overlap-* *-overlap* tp-comm-* disable-tp-comm-*
    defer-embedding-wgrad-compute wgrad-deferral-limit ddp-* manual-gc* no-manual-gc-eval
    empty-unused-memory-level cuda-graph-* enable-cuda-graph te-rng-tracker distributed-backend
    local-rank lazy-mpu-init disable-gloo-process-groups high-priority-stream-groups use-nccl-ub
    no-overlap-p2p-communication no-scatter-gather-tensors-in-pipeline account-for-* no-align-*
    no-async-tensor-model-parallel-allreduce no-persist-layer-norm use-cpu-initialization
    init-model-with-meta-device no-initialization log-* no-log-* timing-log-*
    no-barrier-with-level-1-timing logging-level no-one-logger disable-straggler-on-startup
    no-check-for-nan-in-loss-and-grad ckpt-* no-ckpt-* dist-ckpt-* auto-detect-ckpt-format async-save
    no-load-* no-save-* use-persistent-ckpt-worker use-checkpoint-* override-opt_param-scheduler
    override-opt-param-scheduler num-workers data-cache-path num-dataset-builder-threads
    dataloader-type no-mmap-bin-files no-create-attention-mask-in-dataloader no-data-sharding
    no-use-* no-pin-* apply-query-key-layer-scaling attention-softmax-in-fp32
    accumulate-allreduce-grads-in-fp32 wandb-save-dir eval-*
"""
"""Flags that affect only the speed or the logging of Megatron-LM, and functions that are the same
here: nothing is lost without them. ``apply-layernorm-1p`` stores a norm's weight less 1.
"""
WITHOUT_EFFECT = """
    moe-* muon-* mup-* mtp-* *loss-scale* hysteresis start-weight-decay end-weight-decay
    decoupled-min-lr
"""
"""Flags of options that this file does not use, or that are refused by another flag."""
RULES = (
    *MODELS,
    *RECIPES,
    *LISTED,
    *rules(
        DropReason.NEEDLESS,
        {
            "save load": "a run lives in run.directory/run.name, and resumes there",
            f"{WITHOUT_EFFECT} {NEEDLESS}": "",
        },
    ),
)
"""Rules for all flags without a translation; the first that matches applies."""
