"""Small jobs for dry runs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from meshwright.config import RunConfig, resolve
from meshwright_plan.dryrun.job import Job


class Planned(NamedTuple):
    """A job, and what was reported while it was planned."""

    job: Job
    reported: list[str]


def configured(
    schedule: str = "1f1b",
    chunks: int = 2,
    model: str = "gpt2",
    num_layers: int = 1,
    optimizer: str = "adamw",
    **parallel: Any,
) -> RunConfig:
    """A small run. ``away``: patterns of layers with activation offload."""
    away = parallel.pop("away", [])
    options: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_layers": num_layers,
        "num_heads": 2,
    }
    if model == "llama":
        options |= {"num_kv_heads": 2, "ffn_size": 64}
    config = RunConfig.model_validate(
        {
            "model": {"builder": f"meshwright_models.{model}:build", "options": options},
            "data": {"train": "in memory", "sequence_length": 16},
            "batch": {"micro_batch_size": 2, "chunks": chunks},
            "parallel": {"bucket_bytes": 2**15, **parallel},
            "pipeline": {"schedule": schedule, "offload_activations": away},
            "optimizer": {"name": optimizer},
            "train": {"device": "cpu"},
        }
    )
    return resolve(config, math.prod(parallel.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")))
