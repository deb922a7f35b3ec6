"""Equal tokens and a capacity: each layout drops those that one process drops,
and verify sees one that does not.
"""

from __future__ import annotations

import functools

import pytest
import torch

import meshwright_models.router
from meshwright.config import RunConfig
from meshwright.verify import Verification, compare, layout_config, parse_layout, run_layout
from meshwright.verify.compare import relative_distances
from meshwright.verify.rank import RankFindings, merge
from meshwright.verify.sources import random_documents, random_sample
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from meshwright_models.equal_scores import OF_TOKENS
from tests.framework.verify.cases import LATER, config_of

LENGTH, STEPS, BATCH = 48, 3, 8
MOE = {"num_experts": 4, "top_k": 2, "capacity_factor": 0.75}


def model(scores: str, *, has_documents: bool) -> RunConfig:
    """Return a mixture without dropout, of sizes that no vector unit divides:
    equal rows of a product differ in last bits.
    """
    sizes = {
        "vocab_size": 61,
        "hidden_size": 40,
        "num_layers": 3,
        "max_sequence_length": LENGTH,
        "num_heads": 4,
    }
    sizes |= {"num_kv_heads": 2, "ffn_size": 20, "moe": MOE | {"router": scores}}  # type: ignore[dict-item]
    config = config_of("meshwright_models.llama:build", sizes, LENGTH)
    return config.replace(data={"document_boundaries": has_documents})


@functools.cache
def proof(scores: str, has_documents: bool, dtype: str = "float64") -> Verification:
    config = model(scores, has_documents=has_documents)
    return Verification(config, global_batch=BATCH, steps=STEPS, dtype=dtype, random_tokens=True)


LAYOUTS = [
    ("softmax", True, "dp2,mbs2"),
    ("softmax", True, "cp2"),
    ("softmax", True, "dp2,ep2"),
    ("softmax", True, "tp2,sequence"),
    ("sigmoid", False, "cp2,tp2,ep2,sequence,mbs2"),
    LATER("softmax", True, "cp2,documents,mbs2,full"),
    LATER("sigmoid", True, "dp2,pp2,ep2,mbs2,zb_v"),
    LATER("sigmoid", True, "dp2,tp2,ep4,sequence,zero3"),
    LATER("softmax", False, "dp2,mbs4"),
    LATER("softmax", False, "pp2,cp2,contiguous,zb_h1"),
]


@pytest.mark.parametrize(("scores", "has_documents", "text"), LAYOUTS)
def test_the_dropped_tokens_are_those_of_one_process(
    scores: str, has_documents: bool, text: str, pool: RankPool
) -> None:
    verification = proof(scores, has_documents)
    expected = verification._reference(1).findings
    layout = parse_layout(text)
    config = layout_config(verification.config, layout, BATCH, "float64")
    found = merge(pool.run(run_layout, layout.size, config.model_dump_json(), STEPS, True))
    for ours, theirs in zip(found.losses, expected.losses, strict=True):
        assert abs(ours - theirs) <= 1e-13 * theirs
    assert max(relative_distances(found.weights, expected.weights).values()) <= 1e-13
    dropped = [name for name in expected.metrics[0] if name.endswith("dropped")]
    assert len(dropped) == 3
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert [ours.get(name) for name in dropped] == [theirs.get(name) for name in dropped]
    assert all(expected.metrics[0][name] > 0 for name in dropped)


@pytest.mark.all_layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_numbers_of_other_precisions(dtype: str, pool: RankPool) -> None:
    row = proof("softmax", True, dtype).compare_layout(
        parse_layout("cp2,mbs2"), pool, is_repeated=False
    )
    assert row.passed, (row.problems, row.failure)


def run_by_last_bits(rank: int, world_size: int, config_json: str) -> RankFindings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OF_TOKENS, torch.float64, 0.0)
        return run_layout(rank, world_size, config_json, STEPS, True)


@pytest.mark.parametrize("text", ["tp2,sequence", LATER("cp2"), LATER("dp2,mbs2")])
def test_a_choice_by_the_last_bits_is_seen(text: str, pool: RankPool) -> None:
    assert meshwright_models.router.OF_TOKENS is OF_TOKENS
    layout, verification = parse_layout(text), proof("softmax", True)
    config = layout_config(verification.config, layout, BATCH, "float64")
    found = merge(pool.run(run_by_last_bits, layout.size, config.model_dump_json()))
    expected = verification._reference(1).findings
    assert compare(text, found, None, expected, TOLERANCES["float64"]).problems


def test_samples_have_equal_tokens() -> None:
    """Runs of one token in all, and documents that begin with one token."""
    tokens, labels = random_sample(1, 499, 32)(0)
    assert tokens[:8].unique().numel() == 1 and tokens[8:].unique().numel() > 8
    assert torch.equal(labels[:-1], tokens[1:])
    several = 0
    for index in range(8):
        inputs, _ = random_documents(1, 499, 32)(index)
        assert inputs["tokens"][inputs["starts"]].unique().numel() == 1
        several += int(inputs["starts"][8:].sum())
    assert several > 8
