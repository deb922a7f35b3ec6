"""A NaN in a weight gradient that the GEMM adds to its sum in W, where no hook of autograd runs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from meshwright.data_parallel import products as products_module
from meshwright.data_parallel.products import add_product
from meshwright.mesh.mesh import close_mesh
from meshwright_launch.pool import RankPool
from tests.framework.data_parallel.test_products import is_matrix
from tests.framework.watch.spoiling import config_for, opened, parts_for, taken

WEIGHT = "block1.mlp.down.weight"


def poisoned_step(rank: int, world_size: int, config_json: str) -> str | None:
    """Return the message of a step in which one product of rank 1 gives NaN."""
    config, mesh = opened(config_json)
    with patch.object(products_module, "adds_products", is_matrix):
        parts = parts_for(config, mesh)
    assert taken(parts) is None
    buckets = [bucket for replica in parts.replicas.values() for bucket in replica.buckets]
    ours = [
        bucket.gradient_views[number]
        for bucket in buckets
        for number, slot in enumerate(bucket.slots)
        if slot.member.info.name == WEIGHT
    ]

    def poisoned(total: Any, product: Any, *, first: bool) -> None:
        add_product(total, product, first=first)
        if any(total is view or total.data_ptr() == view.data_ptr() for view in ours):
            total[0, 0] = float("nan")

    with patch.object(products_module, "add_product", poisoned):
        message = taken(parts)
    close_mesh(mesh)
    return message


def test_a_gradient_that_is_nan_in_w_is_named(pool: RankPool) -> None:
    config = config_for("pp2,zb_h1", dtype="bfloat16")
    messages = set(pool.run(poisoned_step, 2, config.model_dump_json()))
    (message,) = messages
    assert message is not None and f"rank 1 (pp1 dp0 tp0): the gradient of {WEIGHT} " in message, (
        message
    )
