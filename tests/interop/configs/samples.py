"""Files as users of the others have them: keys and forms of their own examples,
sizes and values of this project's.
"""

from __future__ import annotations

import json
import tomllib

TORCHTITAN = """\
# a preset for 64 GPUs

[job]
dump_folder = "./outputs"
description = "an eight"

[profiling]
enable_profiling = true
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
enable_wandb = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.5
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 4
global_batch_size = 512
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 1

[checkpoint]
enable = true
folder = "checkpoint"
interval = 500
async_mode = "disabled"

[compile]
enable = false
components = ["model", "loss"]

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = true

[validation]
enable = false
freq = 500

[comm]
train_timeout_seconds = 300
"""

TORCHTITAN_PIPELINE = """\
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 8
seq_len = 64
steps = 40
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 4
decay_type = "cosine"
[parallelism]
data_parallel_shard_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "3"
[validation]
enable = true
dataset = "c4_validation"
freq = 20
steps = 5
[debug]
seed = 7
"""

TORCHTITAN_JSON = json.dumps(tomllib.loads(TORCHTITAN_PIPELINE), indent=2)

NANOTRON = """\
checkpoints:
  checkpoint_interval: 10
  checkpoints_path: checkpoints
  checkpoints_path_is_shared_file_system: false
  resume_checkpoint_path: null
data_stages:
- data:
    dataset:
      dataset_folder: datasets/books
    num_loading_workers: 1
    seed: 42
  name: Stable Training Stage
  start_training_step: 1
general:
  project: debug
  run: tiny_llama_%date_%jobid
  seed: 41
logging:
  iteration_step_info_interval: 5
  log_level: info
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    bos_token_id: 1
    hidden_act: silu
    hidden_size: 64
    initializer_range: 0.02
    intermediate_size: 128
    is_llama_config: true
    max_position_embeddings: 256
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 2
    rms_norm_eps: 1.0e-05
    rope_interleaved: true
    rope_scaling: null
    rope_theta: 10000.0
    tie_word_embeddings: true
    use_cache: true
    vocab_size: 256
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler:
    learning_rate: 3e-4
    lr_decay_starting_step: null
    lr_decay_steps: 13
    lr_decay_style: cosine
    lr_warmup_steps: 2
    lr_warmup_style: linear
    min_decay_lr: 1.0e-05
  optimizer_factory:
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_eps: 1.0e-08
    name: adamW
    torch_adam_is_fused: true
  weight_decay: 0.01
  zero_stage: 1
parallelism:
  dp: 2
  expert_parallel_size: 1
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_linear_async_communication: true
  tp_mode: REDUCE_SCATTER
  recompute_layer: true
profiler: null
tokenizer:
  tokenizer_name_or_path: somebody/some-tokenizer
tokens:
  batch_accumulation_per_replica: 4
  limit_val_batches: 2
  micro_batch_size: 3
  sequence_length: 256
  train_steps: 15
  val_check_interval: -1
"""

MEGATRON_GPT = r"""torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py
    --num-layers 8
    --hidden-size 64   # narrow
    --num-attention-heads 8
    --seq-length 128
    --max-position-embeddings 128
    --attention-backend auto # Can use (flash/fused/unfused/local)
    --micro-batch-size 1
    --global-batch-size 32
    --rampup-batch-size 16 16 5000
    --train-iters 500
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .01
    --lr-decay-iters 400
	--tensor-model-parallel-size 2
	--pipeline-model-parallel-size 2
	--num-layers-per-virtual-pipeline-stage 2
	--sequence-parallel
	--use-distributed-optimizer
	--recompute-granularity full
	--recompute-method block
	--recompute-num-layers 1
    --data-path /data/books_text_document
    --vocab-file gpt2-vocab.json
    --merge-file gpt2-merges.txt
    --split 949,50,1
    --log-interval 100 --save /checkpoints
"""

MEGATRON_LLAMA = r"""torchrun --nproc_per_node 4 pretrain_gpt.py \
    --use-mcore-models \
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 192 \
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16 \
    --seq-length 128 --max-position-embeddings 128 \
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 \
    --attention-dropout 0.0 --hidden-dropout 0.0 \
    --swiglu --normalization RMSNorm --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --micro-batch-size 1 --global-batch-size 8 \
    --train-samples 4000 --lr-decay-samples 3000 --lr-warmup-samples 80 \
    --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine \
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 \
    --bf16 --manual-gc \
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params \
    --fp8-format hybrid --fp8-param-gather \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --split '99,1,0'
"""

MEGATRON_FLAGS = """\
--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --micro-batch-size 2 \\
  --train-iters 10 --lr=1e-3 --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style linear \\
  --recompute-activations \\
  --vocab-size 128 --no-such-flag-there-is 3
"""
