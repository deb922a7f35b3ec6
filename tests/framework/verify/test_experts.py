"""Mixtures of experts, whole on every rank: the numbers of one process, in which plain torch trains its module."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.verify import parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, VOCAB_SIZE, References, config_of, prove, size_for

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 4, "top_k": 2},
    "deepseek": {"num_experts": 8, "top_k": 3, "expert_ffn_size": 12, "shared_ffn_size": 24, "first_dense": 1}
    | {"router": "sigmoid", "scaling": 2.5, "num_groups": 4, "groups_per_token": 2, "balance": "bias"},
    "qwen2": {"num_experts": 6, "top_k": 6, "shared_ffn_size": 16, "shared_gate": True, "normalise": False},
    "olmoe": {"num_experts": 16, "top_k": 1, "normalise": False},
}
"""Name -> its options. The third sends each token to all experts, the last leaves some experts without a token."""
MLA = {"q_rank": 6, "kv_rank": 10, "nope_dim": 4, "rope_dim": 2, "v_dim": 5}
ATTENTIONS = {"deepseek": {"mla": MLA, "mtp_layers": 1, "dropout": 0.1}, "olmoe": {"qk_norm": "whole"}}
LAYOUTS = [
    *("dp2,pp2,tp2,sequence", "dp2,tp2,zero3", "pp4,interleaved_1f1b", "dp4,zero2,mbs2"),
    *("pp2,zb_h1", "dp2,pp2,full", "tp2", "cp2,tp2,sequence", "cp2,pp2,zb_v"),
]
FIRST = {("deepseek", LAYOUTS[0]), ("qwen2", LAYOUTS[4]), ("olmoe", LAYOUTS[7])}


@pytest.fixture(scope="module")
def references() -> References:
    """Shared by the tests of this module."""
    return References()


CASES = [
    (pytest.param if (name, layout) in FIRST else LATER)(name, layout, id=f"{name}-{layout}")
    for name in MIXTURES
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_has_the_numbers_of_one_process(
    name: str, layout: str, pool: RankPool, references: References
) -> None:
    chosen = parse_layout(layout)
    size, moe = size_for(chosen), MIXTURES[name]
    sizes = {"vocab_size": VOCAB_SIZE, "num_layers": size.num_blocks, "max_sequence_length": size.sequence_length}
    heads = {"num_heads": size.heads, "num_kv_heads": size.heads}
    if name != "deepseek":
        heads |= {"num_heads": 2 * size.heads, "head_dim": 4}
    sizes |= {"hidden_size": 4 * size.heads, "ffn_size": 6 * size.heads, "moe": moe} | heads
    options = sizes | ATTENTIONS.get(name, {}) | ({"mtp_layers": 0} if chosen.cp > 1 else {})  # refused beside cp
    config = config_of("meshwright_models.llama:build", options, size.sequence_length)
    row = prove(config, chosen, pool, references, global_batch=size.global_batch, steps=3, twice=False)
    assert row.passed, "\n".join(row.problems)
