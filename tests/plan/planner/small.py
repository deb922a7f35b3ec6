"""Small models and hardware to plan with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.config import RunConfig
from meshwright_plan.commands.plans import remove_layout
from meshwright_plan.planner.hardware import Hardware, Link
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.model_cache import ModelCache

OPTIONS: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
LLAMA = {"num_kv_heads": 4, "ffn_size": 64}
LENGTH = 16
"""Tokens of a sample."""


def hardware(memory_bytes: int = 2**30, **other: Any) -> Hardware:
    """Four devices in a node, as fast as an H100."""
    values: dict[str, Any] = {
        "name": "box",
        "devices_per_node": 4,
        "memory_bytes": memory_bytes,
        "processors": 132,
        "memory_bytes_per_s": 3.35e12,
        "flops_per_s": {"bfloat16": 989e12, "float32": 67e12},
        "node_link": Link(bytes_per_s=450e9, latency_s=4e-6),
        "cluster_link": Link(bytes_per_s=50e9, latency_s=1e-5),
    }
    return Hardware(**(values | other))


def config(
    builder: str = "meshwright_models.llama:build",
    samples: int = 8,
    dtype: str = "bfloat16",
    **options: Any,
) -> RunConfig:
    """A model of two blocks, without a layout;
    options of a builder that is none of ours are all given.
    """
    own = (
        OPTIONS | (LLAMA if "llama" in builder else {})
        if builder.startswith("meshwright_models.")
        else {}
    )
    return remove_layout(
        RunConfig.model_validate(
            {
                "model": {"builder": builder, "options": own | options},
                "data": {
                    "train": "in memory",
                    "sequence_length": LENGTH,
                    "task": "span_corruption" if "t5" in builder else "causal",
                },
                "train": {"dtype": dtype, "device": "cpu"},
            }
        ),
        1,
        samples,
    )


def cache(
    builder: str = "meshwright_models.llama:build",
    samples: int = 8,
    fused: bool = False,
    **options: Any,
) -> ModelCache:
    """Of such a model."""
    return ModelCache(config(builder, samples, **options), ExecutionOptions(fused=fused))


class Tokens:
    """Token ids without end, drawn by their index: samples that need no corpus."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(
            OPTIONS["vocab_size"], (LENGTH + 1,), generator=torch.Generator().manual_seed(index)
        )
        return ids[:-1], ids[1:]


def tokens(split: str) -> Tokens | None:
    """For ``data.builder``."""
    return Tokens() if split == "train" else None
