"""Peaks that torch measured on an H200 (torch 2.11, benchmarks/gpu_memory.py, gpu_one_rank.py),
and the dry run's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.config import RunConfig, resolve
from meshwright_plan.dryrun.fake_step import profile_rank
from meshwright_plan.dryrun.kernels import as_on_cuda
from tests.support.marks import marked_rows

WORKSPACES = 2 * 32 * 2**20
"""Bytes of cuBLAS on Hopper, one workspace for forward's thread and one for backward's:
torch counts them.
"""
SHAPES = {
    "llama-8b-8-blocks": {"hidden_size": 4096, "num_layers": 8, "num_heads": 32, "ffn_size": 14336},
    "llama-1b": {"hidden_size": 2048, "num_layers": 16, "num_heads": 16, "ffn_size": 8192},
}
MEASURED: list[Any] = [
    pytest.param("llama-1b", 1, 0, {}, 33.764170, marks=pytest.mark.torture),
    ("llama-8b-8-blocks", 1, 5, {"dp": 64}, 24.926974),
    ("llama-8b-8-blocks", 8, 3, {"pp": 8}, 12.087367),
    ("llama-8b-8-blocks", 1, 3, {"cp": 8}, 39.003109),
]
"""Model, micro-batches, rank, layout, GiB."""


def job(name: str, chunks: int, parallel: dict[str, Any]) -> RunConfig:
    """A step of Llama on one sequence of 8,192 tokens per micro-batch, 16,384 per rank of cp,
    in bfloat16.
    """
    length = 16384 * parallel["cp"] if "cp" in parallel else 8192
    sizes = {"vocab_size": 32768, "num_kv_heads": 8, "max_sequence_length": length} | SHAPES[name]
    config = {
        "model": {"builder": "meshwright_models.llama:build", "options": sizes},
        "data": {"train": "random", "sequence_length": length},
        "batch": {"micro_batch_size": 1, "chunks": chunks},
        "parallel": parallel,
        "train": {"dtype": "bfloat16", "device": "cuda", "compile": False},
    }
    return resolve(RunConfig.model_validate(config), math.prod(parallel.values()))


@marked_rows(
    "long",
    "llama-8b-8-blocks-1-5-parallel1-24.926974",
    "llama-8b-8-blocks-8-3-parallel2-12.087367",
    "llama-8b-8-blocks-1-3-parallel3-39.003109",
)
@pytest.mark.parametrize(("name", "chunks", "rank", "parallel", "measured_gib"), MEASURED)
def test_peaks(
    name: str, chunks: int, rank: int, parallel: dict[str, Any], measured_gib: float
) -> None:
    predicted = profile_rank(job(name, chunks, parallel), rank).peak_bytes
    assert (predicted + WORKSPACES) / 2**30 == pytest.approx(measured_gib, rel=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["full", "pointwise", "selective"])
def test_layers_that_run_again_have_the_same_norm(recompute: str) -> None:
    config = job("llama-1b", 1, {}).replace(pipeline={"recompute": recompute})
    options = config.model.options | {"num_layers": 2, "vocab_size": 512}
    found = profile_rank(config.replace(model={"options": options}), 0)
    assert found.held and torch.rms_norm.__module__ != as_on_cuda.__module__


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_a_norm_keeps_its_input_and_one_number_per_row(weight_dtype: torch.dtype) -> None:
    """With weights in another dtype CUDA has no kernel: torch's own operations run."""
    norm = nn.RMSNorm(16).to(weight_dtype)
    x = torch.ones(2, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Size] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t),
        as_on_cuda(),
    ):
        y = norm(x)
    if weight_dtype == torch.bfloat16:
        assert kept == [(2, 4, 16), (16,), (2, 4, 1)] and y.dtype == torch.bfloat16
    else:
        assert len(kept) > 3
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and norm.weight.grad.shape == (16,)
