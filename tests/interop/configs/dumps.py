"""YAML that Megatron-Bridge writes and Megatron-LM's functional tests have,
with values of this project's.
"""

from __future__ import annotations

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
