"""Frozen base of adapters under ZeRO-3: cut over the replicas, gathered with its layer,
saved and resumed whole.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from meshwright.build import build
from meshwright.config import parse, shard_factor
from meshwright.data_parallel.members import full_weights
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.optimizer.at_rest import Elements, held_at_rest
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.adapters.test_attach import BLOCKS, adapted
from tests.framework.verify.cases import LATER, References, assert_agrees
from tests.support.marks import long_row


@pytest.mark.parametrize(
    ("model", "layout", "targets", "dtype", "dora"),
    [
        long_row("llama", "dp2,zero3,full", [*BLOCKS, "head"], "float64", True),
        # tied, and a stage without adapters
        ("gpt2", "dp2,pp2,zero3,zb_h1", ["block1.mlp.*"], "float64", False),
        LATER("llama", "dp2,pp2,tp2,zero3,sequence", BLOCKS, "float64", True),
        LATER("llama", "dp4,zero3,shard2", BLOCKS, "float32", False),
        LATER("gpt2", "dp2,zero3,mbs2,selective", BLOCKS, "bfloat16", False),
        LATER("llama", "dp2,pp2,zero3,zb_v", BLOCKS, "float64", False),
        LATER("llama", "dp2,cp2,zero3", BLOCKS, "float64", True),
        LATER("llama", "dp2,pp2,zero3,interleaved_1f1b", BLOCKS, "float64", False),
        # rows that three ranks do not divide
        LATER("llama", "dp3,zero3", BLOCKS, "float64", False),
        LATER("t5", "dp2,zero3", ["*.q", "*.up"], "float64", False),
    ],
)
def test_numbers_of_one_plain_process(
    model: str,
    layout: str,
    targets: list[str],
    dtype: str,
    dora: bool,
    pool: RankPool,
    references: References,
) -> None:
    config, global_batch = adapted(model, layout, targets, dora=dora)
    chosen = parse_layout(layout)
    assert_agrees(config, chosen, pool, references, global_batch=global_batch, steps=2, dtype=dtype)


class Held(NamedTuple):
    """Elements and bytes of a rank between steps."""

    frozen: int
    held: int
    """Elements of the frozen weights that it holds, and ``bytes`` of them."""
    bytes: int
    planned: int
    """Bytes of weights at rest in a plan."""
    trained: int
    unchanged: bool


def after_a_step(rank: int, world_size: int, config_json: str) -> Held:
    """Run one step of a rank."""
    config = parse(config_json)
    mesh = open_mesh(Grid(dp=world_size), "cpu")
    parts = build(config, mesh, (open_verify_source(config, random_tokens=True), {}))
    [replica] = parts.replicas.values()
    before = [full_weights(bucket).clone() for bucket in replica.frozen_shards]
    take_step(parts)
    assert not replica.frozen
    full = [full_weights(bucket) for bucket in replica.frozen_shards]
    rows = [bucket.master for bucket in replica.frozen_shards]
    frozen = sum(each.numel() for each in full)
    trained = sum(bucket.master.numel() for bucket in replica.buckets)
    at_rest = Elements(0, trained * shard_factor(config.parallel), frozen)
    return Held(
        frozen,
        sum(each.untyped_storage().nbytes() // each.itemsize for each in rows),
        sum(each.untyped_storage().nbytes() for each in rows),
        held_at_rest(config.parallel, config.optimizer, config.train.dtype, at_rest)[0],
        trained,
        all(map(torch.equal, before, full)),
    )


def test_a_rank_holds_its_rows_alone_and_the_base_keeps_its_bits(pool: RankPool) -> None:
    config, global_batch = adapted("llama", "dp2,zero3", BLOCKS)
    text = layout_config(
        config, parse_layout("dp2,zero3"), global_batch, "bfloat16"
    ).model_dump_json()
    for held in pool.run(after_a_step, 2, text):
        assert held.held == held.frozen // 2 and held.bytes == 2 * held.held and held.unchanged
        assert held.planned == held.bytes + 4 * held.trained
