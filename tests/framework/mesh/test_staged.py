"""Messages of ranks that share a GPU go through host memory, without a change of any number."""

from __future__ import annotations

import pytest
import torch

from meshwright.build import build
from meshwright.config import RunConfig, parse, resolve
from meshwright.mesh.comm import Transfer
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.step import take_step
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.support.marks import long_row

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
}


def config(**parallel: int) -> RunConfig:
    options = {**SIZES, "max_sequence_length": 16}
    found = RunConfig.model_validate(
        {
            "model": {"builder": "meshwright_models.llama:build", "options": options},
            "data": {"train": "random", "sequence_length": 16},
            "batch": {"micro_batch_size": 1, "global_batch": 4},
            "parallel": parallel,
            "train": {"device": "cpu"},
        }
    )
    return resolve(found, 2)


def losses(rank: int, world_size: int, text: str, stages: bool) -> list[float]:
    """Of three steps of a layout whose messages do, or do not, go through copies."""
    found = parse(text)
    mesh = open_mesh(Grid.of(found.parallel.degrees), "cpu", share_devices=True)
    mesh.pp.stages_messages = stages
    parts = build(found, mesh, (open_verify_source(found, random_tokens=True), {}))
    taken = [take_step(parts).loss for _ in range(3)]
    close_mesh(mesh)
    return taken


@pytest.mark.parametrize("parallel", [long_row({"pp": 2}), long_row({"tp": 2}), {"dp": 2}], ids=str)
def test_staged_messages_change_no_bit(pool: RankPool, parallel: dict[str, int]) -> None:
    text = config(**parallel).model_dump_json()
    plain, staged = (pool.run(losses, 2, text, stages) for stages in (False, True))
    assert plain == staged and plain[0] == plain[1] and len(set(plain[0])) == 3


def exchanged(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """(the sent tensor, what has arrived before and after the wait),
    the sent one being overwritten at once.
    """
    mesh = open_mesh(Grid(pp=2), "cpu")
    mesh.pp.stages_messages = True
    ours, arriving = torch.full((3,), rank + 1.0), torch.zeros(3)
    other = 1 - mesh.rank
    sent, received = mesh.pp.exchange(
        [Transfer(ours, other, True), Transfer(arriving, other, False)], lambda: ""
    )
    ours.fill_(-1.0)
    before = arriving.tolist()
    received.wait()
    sent.wait()
    close_mesh(mesh)
    return before, arriving.tolist()


def test_a_message_is_a_copy_that_arrives_with_the_wait(pool: RankPool) -> None:
    assert pool.run(exchanged, 2) == [([0.0] * 3, [2.0] * 3), ([0.0] * 3, [1.0] * 3)]
