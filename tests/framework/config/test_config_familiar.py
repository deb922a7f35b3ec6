"""Names from Megatron-LM, torchtitan, nanotron and DeepSpeed are recognised in the error,
and only there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load
from meshwright.config.aliases import FAMILIAR, fold
from meshwright.config.keys import KEYS, SECTIONS
from tests.support.errors import raises

SOUND = '[data]\ntrain = "x"\n[batch]\nmicro_batch_size = 1\nchunks = 1\n'


@pytest.mark.parametrize(
    ("name", "here"),
    [
        # Megatron-LM
        ("tensor_model_parallel_size", "parallel.tp"),
        ("tensor-model-parallel-size", "parallel.tp"),
        ("Tensor_Model-Parallel_Size", "parallel.tp"),
        ("pipeline-model-parallel-size", "parallel.pp"),
        ("sequence-parallel", "parallel.sequence"),
        ("use-distributed-optimizer", "parallel.zero = 1"),
        ("micro-batch-size", "batch.micro_batch_size"),
        ("global-batch-size", "batch.global_batch"),
        ("num_microbatches", "batch.chunks"),
        ("seq-length", "data.sequence_length"),
        ("data-path", "data.train"),
        ("tokenizer-model", "data.tokenizer"),
        ("lr", "optimizer.learning_rate"),
        ("min-lr", "optimizer.min_learning_rate"),
        ("lr-warmup-iters", "optimizer.warmup_steps"),
        ("lr-decay-style", "optimizer.schedule"),
        ("lr-wsd-decay-iters", "optimizer.decay_steps"),
        ("clip-grad", "optimizer.clip_norm"),
        ("weight-decay", "optimizer.weight_decay"),
        ("adam-beta1", "optimizer.betas"),
        ("adam-eps", "optimizer.eps"),
        ("train-iters", "train.steps"),
        ("bf16", 'train.dtype = "bfloat16"'),
        ("context-parallel-size", "parallel.cp"),
        ("expert-model-parallel-size", "parallel.ep"),
        ("recompute-granularity", "pipeline.recompute"),
        ("fp8-format", 'train.linear = "fp8"'),
        ("lora-rank", "adapter.rank"),
        ("eval-interval", "train.validate_every"),
        ("eval-iters", "train.validate_steps"),
        ("save-interval", "checkpoint.every"),
        ("log-interval", "tracking.log_every"),
        ("seed", "run.seed"),
        ("num-layers", "model.options"),
        # torchtitan
        ("parallelism.tensor_parallel_degree", "parallel.tp"),
        ("parallelism.pipeline_parallel_degree", "parallel.pp"),
        (
            "parallelism.data_parallel_replicate_degree",
            "parallel.dp divided by parallel.shard_factor",
        ),
        ("parallelism.pipeline_parallel_schedule", "pipeline.schedule"),
        ("training.local_batch_size", "batch.micro_batch_size"),
        ("training.global_batch_size", "batch.global_batch"),
        ("training.seq_len", "data.sequence_length"),
        ("training.steps", "train.steps"),
        ("training.max_norm", "optimizer.clip_norm"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr_scheduler.warmup_steps", "optimizer.warmup_steps"),
        ("checkpoint.interval", "checkpoint.every"),
        ("metrics.log_freq", "tracking.log_every"),
        # nanotron, DeepSpeed
        ("parallelism.pp_engine", "pipeline.schedule"),
        ("tokens.batch_accumulation_per_replica", "batch.chunks"),
        ("optimizer.learning_rate_scheduler.min_decay_lr", "optimizer.min_learning_rate"),
        ("train_micro_batch_size_per_gpu", "batch.micro_batch_size"),
        ("zero_optimization.stage", "parallel.zero"),
        ("model.vocab_size", "model.options"),
    ],
)
def test_a_familiar_name_says_what_it_is_here(tmp_path: Path, name: str, here: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SOUND)
    with raises("MW-CONFIG-013", "command line", f"{name} = 1", here) as caught:
        load(path, [f"--{name}=1"])
    assert len(caught.value.problems) == 1

    path.write_text(f"{name} = 1\n{SOUND}")
    if name.partition(".")[0] not in SECTIONS or "." not in name:
        with raises("MW-CONFIG-013", "run.toml", f"{name} = 1", here):
            load(path)


def test_the_table_points_to_keys_that_there_are() -> None:
    for name, here in FAMILIAR.items():
        first = here.split()[0].rstrip(":,")
        assert tuple(first.split(".")) in KEYS, (name, here)


def test_no_key_of_ours_is_taken_for_a_foreign_one() -> None:
    for key in KEYS:
        assert fold(".".join(key)) not in FAMILIAR, key
