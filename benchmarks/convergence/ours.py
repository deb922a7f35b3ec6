"""This framework: ``meshwright train`` on one of four layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from task import Result, Task, first_weights, hugging_face_config

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "one": {},
    "dp2-zero3": {"parallel.dp": "2", "parallel.zero": "3"},
    "pp2-tp2": {
        "parallel.pp": "2",
        "parallel.tp": "2",
        "parallel.sequence": "true",
        "pipeline.schedule": '"1f1b"',
    },
    "dp2-pp2-cp2": {
        "parallel.dp": "2",
        "parallel.pp": "2",
        "parallel.cp": "2",
        "pipeline.schedule": '"zb_h1"',
    },
}

CONFIG = """
[run]
name = "convergence"
directory = "{runs}"
seed = {seed}
start = "{weights}"

[model]
builder = "meshwright_models.llama:build"

[model.options]
vocab_size = {task.vocab_size}
hidden_size = {task.hidden_size}
num_layers = {task.num_layers}
num_heads = {task.num_heads}
num_kv_heads = {task.num_kv_heads}
ffn_size = {task.ffn_size}
rope_theta = {task.rope_theta}
norm_eps = {task.norm_eps}
max_sequence_length = {task.sequence_length}

[data]
builder = "benchmarks.convergence.task:build"

[data.options]
corpus = "{corpus}"
seed = {seed}
task = {fields}

[batch]
micro_batch_size = {task.micro_batch_size}
global_batch = {task.global_batch}

[optimizer]
learning_rate = {task.learning_rate}
min_learning_rate = {task.min_learning_rate}
schedule = "cosine"
warmup_steps = {task.warmup_steps}
betas = [{task.betas[0]}, {task.betas[1]}]
eps = {task.eps}
weight_decay = {task.weight_decay}
clip_norm = {task.clip_norm}

[train]
steps = {task.steps}
dtype = "float32"
device = "cpu"
validate_every = {task.steps}
validate_steps = {validate_steps}

[checkpoint]
every = {task.steps}

[tracking]
wandb = "off"
"""


def table_of(task: Task) -> str:
    """Return the task as an inline table of TOML."""
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in task._asdict().items()}
    return (
        "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + " }"
    )


def train(task: Task, corpus: Path, seed: int, layout: str) -> Result:
    """Train by the command, and read its records."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = folder / "weights"
        weights.mkdir()
        (weights / "config.json").write_text(json.dumps(hugging_face_config(task)))
        save_file(
            first_weights(task, seed), weights / "model.safetensors", metadata={"format": "pt"}
        )
        config = folder / "config.toml"
        config.write_text(
            CONFIG.format(
                task=task,
                fields=table_of(task),
                runs=folder / "runs",
                weights=weights,
                corpus=corpus.resolve(),
                seed=seed,
                validate_steps=task.num_validation // task.global_batch,
            )
        )
        overrides = [f"--{key}={value.strip(chr(34))}" for key, value in LAYOUTS[layout].items()]
        subprocess.run(
            [sys.executable, "-m", "meshwright_launch", "train", str(config), *overrides],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        )
        lines = (folder / "runs/convergence/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    validation = [record["validation/loss"] for record in records if "validation/loss" in record]
    losses, rates = ([record[key] for record in records] for key in ("train/loss", "train/lr"))
    return Result(losses, rates, validation[-1])
