"""``train.compile``: the same numbers as without, and no graph compiled after the first step."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from meshwright.build import build
from meshwright.config import RunConfig, batch_numbers
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.support.marks import long_row

STEPS = 3

GPT2 = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": 16,
    "dropout": 0.1,
}
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
    "dropout": 0.1,
}


class Trained(NamedTuple):
    """What one rank reports."""

    losses: list[float]
    grad_norms: list[float]
    graphs: list[int]
    """Compiled so far, after each step."""


def train(rank: int, world_size: int, config: RunConfig) -> Trained:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    mesh = open_mesh(Grid.of(config.parallel.degrees), config.train.device)
    parts = build(config, mesh, (open_verify_source(config, random_tokens=True), {}))
    found = Trained([], [], [])
    for _ in range(STEPS):
        stats = take_step(parts)
        found.losses.append(stats.loss)
        found.grad_norms.append(stats.grad_norm)
        found.graphs.append(counters["stats"]["unique_graphs"])
    return found


def laid_out(builder: str, layout: str, *, compiled: bool) -> RunConfig:
    """``layout``: as for verify, with ``fp8`` for float8 in all linears but the head."""
    layout, in_fp8, _ = layout.partition(",fp8")
    options, by_documents = GPT2 if "gpt2" in builder else LLAMA, layout.endswith("documents")
    # attention without its probabilities
    options = options | {"dropout": 0.0} if "cp" in layout else options
    config = RunConfig.model_validate(
        {
            "model": {"builder": builder, "options": options},
            "data": {"train": "none", "sequence_length": 16, "document_boundaries": by_documents},
            "batch": {"micro_batch_size": 1, "chunks": 4},
        }
    )
    config = layout_config(config, parse_layout(layout), 8, "float32")
    fp8 = {"linear": "fp8", "fp8_keep": ["head"]} if in_fp8 else {}
    return config.model_copy(
        update={"train": config.train.model_copy(update={"compile": compiled, **fp8})}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "layout"),
    [
        long_row("meshwright_models.gpt2:build", "dp1"),
        pytest.param("meshwright_models.gpt2:build", "dp2,pp2,tp2", marks=pytest.mark.torture),
        pytest.param(
            "meshwright_models.llama:build", "pp2,tp2,sequence", marks=pytest.mark.torture
        ),
        pytest.param("meshwright_models.gpt2:build", "pp2,zb_h1", marks=pytest.mark.torture),
        pytest.param(
            "meshwright_models.llama:build", "dp2,pp2,zb_h1,full,zero3", marks=pytest.mark.torture
        ),
        pytest.param(
            "meshwright_models.llama:build", "pp2,tp2,sequence,zb_v", marks=pytest.mark.torture
        ),
        pytest.param("meshwright_models.llama:build", "pp2,zb_v,fp8", marks=pytest.mark.torture),
        pytest.param("meshwright_models.llama:build", "cp2", marks=pytest.mark.torture),
        pytest.param("meshwright_models.llama:build", "cp2,heads", marks=pytest.mark.torture),
        pytest.param("meshwright_models.llama:build", "cp2,documents", marks=pytest.mark.torture),
        pytest.param(
            "meshwright_models.llama:build", "pp2,tp2,sequence,zb_h1,fp8", marks=pytest.mark.torture
        ),
    ],
)
def test_compiled_layers_give_the_same_numbers(pool: RankPool, builder: str, layout: str) -> None:
    """Dropouts above zero: their masks are hashed in compiled code,
    from names that all layers of a graph share.
    """
    size = parse_layout(layout.removesuffix(",fp8")).size
    plain = pool.run(train, size, laid_out(builder, layout, compiled=False))
    compiled = pool.run(train, size, laid_out(builder, layout, compiled=True), timeout_s=600)
    assert batch_numbers(laid_out(builder, layout, compiled=True).batch).chunks >= 4, (
        "or a graph per micro-batch may pass"
    )
    for without, with_ in zip(plain, compiled, strict=True):
        assert with_.losses == pytest.approx(without.losses, rel=1e-6)
        assert with_.grad_norms == pytest.approx(without.grad_norms, rel=1e-5)
        assert without.graphs == [0] * STEPS
        assert with_.graphs[0] > 0 and len(set(with_.graphs)) == 1, with_.graphs
