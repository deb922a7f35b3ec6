"""Balanced experts: bias, sequence loss, batch loss and z-loss in layouts,
and faults of each that must be seen.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from meshwright.config import RunConfig
from meshwright.verify import Verification, layout_config, parse_layout, run_layout
from meshwright.verify.near_ties import NearestTie
from meshwright.verify.rank import merge
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER
from tests.support.marks import marked_rows

SIZES = {
    "vocab_size": 33,
    "num_layers": 2,
    "max_sequence_length": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}
SIZES |= {"hidden_size": 16, "ffn_size": 16}
MOE = {"num_experts": 6, "top_k": 2, "router": "sigmoid", "balance": "bias", "bias_rate": 0.01}
LOSSES = {"sequence": {"sequence_loss": 0.5, "router_z_loss": 0.02}, "batch": {"batch_loss": 0.5}}


def config_of(losses: str, fault: str = "") -> RunConfig:
    options: dict[str, Any] = SIZES | {"moe": MOE | LOSSES[losses], "fault": fault}
    return RunConfig().replace(
        model={"builder": "tests.framework.verify.faulty_router:build", "options": options},
        data={"sequence_length": 16},
        train={"device": "cpu", "steps": 20},
    )


@functools.cache
def proof(losses: str) -> Verification:
    return Verification(config_of(losses), global_batch=8, steps=3, random_tokens=True)


CASES = [
    ("sequence", "cp2,tp2,sequence", True),
    ("sequence", "dp2,pp2,full", False),
    ("sequence", "dp2,tp2,sequence,zero3,mbs2", False),
    ("sequence", "pp2,zb_h1", False),
    ("sequence", "pp2,interleaved_1f1b,mbs2", False),
    ("batch", "dp2,tp2,sequence,mbs2", True),
    ("batch", "pp2,tp2,zb_h1,mbs4", False),
    ("batch", "dp2,tp2,ep2,sequence,mbs2", False),
]


@marked_rows("long", "sequence-cp2,tp2,sequence", "batch-dp2,tp2,sequence,mbs2")
@pytest.mark.parametrize(
    ("losses", "text"), [(pytest.param if is_first else LATER)(*case) for *case, is_first in CASES]
)
def test_losses_and_bias_are_those_of_one_process(losses: str, text: str, pool: RankPool) -> None:
    layout = parse_layout(text)
    row = proof(losses).compare_layout(layout, pool, is_repeated=False)
    assert row.passed, (row.problems, row.failure)
    config = layout_config(config_of(losses), layout, 8, "float64")
    found = merge(pool.run(run_layout, layout.size, config.model_dump_json(), 3, True))
    expected = (
        proof(losses)._reference(layout.micro_batch_size if losses == "batch" else 1).findings
    )
    for block in (0, 1):
        name = f"block{block}.mlp.router.bias"
        assert torch.equal(found.weights[name], expected.weights[name]), (
            "integers are summed exactly"
        )
        assert 0 < found.weights[name].abs().max() < 0.031


def test_near_ties_are_reported() -> None:
    tie = proof("sequence")._reference(1).findings.nearest_tie
    assert 0 < tie.gap < 0.01 and tie.router.startswith("block")
    assert f"nearest tie of a router: {tie.gap:.1e}" in proof("sequence").report([]).table()
    assert "try another run.seed" in tie._replace(gap=1e-14).sentence(
        "float64"
    ) and not NearestTie().sentence("float64")


FAULTS = {
    "loss x tp": ("tp2,sequence", "gradients of step 1 differ"),
    "loss / dp": ("dp2", "gradients of step 1 differ"),
    "loss not attached": ("dp2", "gradients of step 1 differ"),
    "tokens of one rank": ("tp2,sequence", "gradients of step 1 differ"),
    "not summed over tp": ("tp2,sequence", "of sums block0.mlp.router.counts of step 1"),
    "counted again": ("dp2,full", "of sums block0.mlp.router.counts of step 1"),
}


@marked_rows("long", "not summed over tp")
@pytest.mark.parametrize(
    "fault", [fault if fault == "not summed over tp" else LATER(fault) for fault in FAULTS]
)
def test_a_fault_is_seen(fault: str, pool: RankPool) -> None:
    text, said = FAULTS[fault]
    faulty = proof("sequence")
    config, good = config_of("sequence", fault), faulty.config
    try:
        faulty.config = config
        row = faulty.compare_layout(parse_layout(text), pool, is_repeated=False)
    finally:
        faulty.config = good
    assert any(said in problem for problem in row.problems), (row.problems, row.failure)
