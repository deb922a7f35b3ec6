"""Files that programs write: torchtitan's JSON, Megatron-Bridge's YAML, in their form and with own values."""

from __future__ import annotations

import json
from typing import Any


def linear(inner: int, outer: int, *, bias: bool = False) -> dict[str, Any]:
    return {
        "in_features": inner,
        "out_features": outer,
        "bias": bias,
        "param_init": {"weight": "functools.partial(<function trunc_normal_>, std=0.02)"},
    }


def layer(number: int, **attention: Any) -> dict[str, Any]:
    norm = {
        "normalized_shape": 64,
        "eps": 1e-5,
        "elementwise_affine": True,
        "param_init": {"weight": "<function ones_>"},
    }
    rope = {
        "dim": 16,
        "max_context_length": 131072,
        "theta": 500000,
        "scaling": "llama",
        "scaling_factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "attention": {
            "n_heads": 4,
            "dim": 64,
            "qkv_linear": {"head_dim": 16, "n_heads": 4, "n_kv_heads": 2, "wqkv": linear(64, 128)},
            "wo": linear(64, 64) | {"param_init": {"weight": f"functools.partial(std={0.02 / (number + 1)})"}},
            "qk_norm": None,
            "n_kv_heads": 2,
            "head_dim": None,
            "inner_attention": {"block_size": 128, "kernel_options": {}},
            "rope": rope,
        }
        | attention,
        "feed_forward": {"w1": linear(64, 192), "w2": linear(192, 64), "w3": linear(64, 192)},
        "moe": None,
        "attention_norm": norm,
        "ffn_norm": norm,
    }


def torchtitan(**changed: Any) -> dict[str, Any]:
    """``Trainer.Config.to_dict`` of August 2026, with some of its keys; ``changed``: sections with other values."""
    sections: dict[str, Any] = {
        "model_spec": {
            "name": "llama3",
            "flavor": "tiny",
            "model": {
                "dim": 64,
                "vocab_size": 512,
                "lm_head": linear(64, 512),
                "tok_embeddings": {"num_embeddings": 512, "embedding_dim": 64},
                "norm": layer(0)["ffn_norm"],
                "layers": [layer(0), layer(1)],
                "enable_weight_tying": True,
            },
        },
        "hf_assets_path": "./assets/hf/a-model",
        "dump_folder": "./outputs",
        "profiler": {"enable_profiling": False, "profile_freq": 10},
        "metrics": {"log_freq": 5, "enable_tensorboard": True},
        "dataloader": {"dataset": {"dataset": {"path": "allenai/c4"}}, "shuffle": True},
        "optimizer": {
            "param_groups": [
                {
                    "pattern": ".*",
                    "optimizer_name": "AdamW",
                    "optimizer_kwargs": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
                }
            ],
            "implementation": "fused",
        },
        "lr_scheduler": {
            "warmup_steps": 4,
            "total_steps": None,
            "decay_ratio": None,
            "decay_type": "cosine",
            "min_lr_factor": 0.1,
        },
        "training": {
            "num_tokens_per_microbatch_per_dp_rank": 256,
            "num_tokens_per_train_step": 2048,
            "max_context_length": 64,
            "max_norm": 1.0,
            "steps": 40,
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": 4,
            "tensor_parallel_degree": 1,
            "pipeline_parallel_degree": 1,
            "pipeline_parallel_schedule": "1F1B",
            "num_pp_microbatches": 1,
            "context_parallel_degree": 1,
            "expert_parallel_degree": 1,
        },
        "checkpoint": {"enable": True, "interval": 20, "async_mode": "disabled", "keep_latest_k": 3},
        "activation_checkpoint": {"preserve_rng_state": True, "determinism_check": "default", "debug": False},
        "compile": {"enable": False, "components": ["model", "loss"], "backend": "inductor"},
        "comm": {"train_timeout_seconds": 100},
        "validator": {"enable": False, "freq": 10, "steps": -1},
        "debug": {"seed": 7, "save_config_file": "config.json"},
        "loss": {"num_chunks": 8, "loss_fn": {"global_vocab_size": 512}},
    }
    return {name: section | changed[name] if name in changed else section for name, section in sections.items()}


def text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2)


BRIDGE = """\
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  save: /checkpoints
  save_interval: 20
  pretrained_checkpoint: null
dataset:
  _target_: megatron.bridge.training.config.GPTDatasetConfig
  blend:
  - - /data/books
    - /data/code
  - - 0.3
    - 0.7
  random_seed: 1234
  reset_attention_mask: false
  reset_position_ids: false
  eod_mask_loss: false
  sequence_length: 64
ddp:
  use_distributed_optimizer: true
logger:
  log_interval: 10
  wandb_project: null
mixed_precision:
  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
  bf16: true
  fp16: false
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  attention_dropout: 0.0
  bf16: true
  context_parallel_size: 1
  ffn_hidden_size: 192
  fp8: null
  gated_linear_unit: true
  hidden_dropout: 0.0
  hidden_size: 64
  high_freq_factor: 4.0
  init_method_std: 0.01
  kv_channels: 32
  layernorm_epsilon: 1.0e-05
  low_freq_factor: 1.0
  moe_router_topk: 2
  mtp_num_layers: null
  multi_latent_attention: false
  normalization: RMSNorm
  num_attention_heads: 4
  num_layers: 4
  num_moe_experts: null
  num_query_groups: 2
  old_context_len: 8192
  pipeline_model_parallel_size: 2
  position_embedding_type: rope
  qk_layernorm: true
  rotary_base: 500000.0
  rotary_percent: 1.0
  scale_factor: 32.0
  seq_length: 131072
  share_embeddings_and_output_weights: true
  softmax_type: vanilla
  tensor_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  vocab_size: 512
  window_size: null
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  adam_beta1: 0.9
  adam_beta2: 0.95
  adam_eps: 1.0e-05
  bf16: true
  clip_grad: 1.0
  lr: 0.0003
  min_lr: 3.0e-05
  optimizer: adam
  use_distributed_optimizer: true
  weight_decay: 0.1
peft: null
rng:
  seed: 7
scheduler:
  _target_: megatron.bridge.training.config.SchedulerConfig
  end_weight_decay: 0.033
  lr_decay_iters: 30
  lr_decay_steps: 240
  lr_decay_style: cosine
  lr_warmup_fraction: null
  lr_warmup_init: 0.0
  lr_warmup_iters: 4
  start_weight_decay: 0.033
  weight_decay_incr_style: constant
tokenizer:
  tokenizer_type: NullTokenizer
  vocab_size: 512
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  global_batch_size: 8
  micro_batch_size: 1
  rampup_batch_size: null
  train_iters: 40
"""
"""``run_config.yaml`` of Megatron-Bridge 0.2, with some of its fields."""

MODEL_CONFIG = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --tensorboard-dir: ${TENSORBOARD_PATH}
  --micro-batch-size: 2
  --global-batch-size: 8
  --seq-length: 64
  --max-position-embeddings: 64
  --train-iters: 50
  --lr-decay-iters: 40
  --data-path: ${DATA_PATH}/text_document
  --vocab-size: 512
  --lr: 0.00015
  --lr-decay-style: cosine
  --min-lr: 1.0e-5
  --lr-warmup-fraction: .01
  --use-distributed-optimizer: true
  --sequence-parallel: false
  --bf16: true
TEST_TYPE: regular
"""
