"""Shared experts beside every other feature, in float64 against one plain process;
what has no pair is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import meshwright.model.build
from meshwright.config import RunConfig
from meshwright.mesh.comm import Group
from meshwright.model.build import configured_model
from meshwright.parameters import ParameterInfo
from meshwright.verify import Verification, compare, layout_config, parse_layout
from meshwright.verify.rank import RankFindings, merge, run_layout
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, References, assert_agrees
from tests.framework.verify.test_expert_parallel import model
from tests.support.errors import raises
from tests.support.marks import long_row, marked_rows

MUON: dict[str, Any] = {"optimizer": {"name": "muon", "learning_rate": 1e-2}}
MOONLIGHT: dict[str, Any] = {"optimizer": {**MUON["optimizer"], "scale": "match_rms_adamw"}}
BLOCKS: dict[str, Any] = {"optimizer": {"name": "adamw8bit", "block_size": 8}}
ADAPTERS: dict[str, Any] = {"adapter": {"rank": 3, "targets": ["*.mlp.*", "*.attention.*"]}}
FLOAT8: dict[str, Any] = {"train": {"linear": "fp8", "fp8_keep": ["head"]}}
DOCUMENTS: dict[str, Any] = {"data": {"document_boundaries": True}}
OFFLOADED: dict[str, Any] = {"pipeline": {"offload_activations": ["block*"]}}
GROUPS = [
    {"names": ["block0.mlp.*"], "frozen": True},
    {"names": ["block1.mlp.experts*"], "learning_rate_factor": 0.5, "weight_decay": 0.0},
]
FROZEN: dict[str, Any] = {"model": {"parameter_groups": GROUPS}}
BALANCED = {"num_experts": 6, "top_k": 2, "router": "sigmoid", "balance": "bias", "bias_rate": 0.01}
LOSSES: dict[str, Any] = {"sequence_loss": 0.5, "router_z_loss": 0.02}
FREE: dict[str, Any] = {"name": "schedule_free_adamw", "schedule": "constant", "warmup_steps": 0}


def balanced(**losses: float) -> dict[str, Any]:
    return {"model.options": {"moe": BALANCED | losses}}


DEEP: dict[str, Any] = {"model.options": {"num_layers": 4}}
BESIDE = {
    "muon": MUON,
    "adapters": ADAPTERS,
    "fp8": FLOAT8,
    "adamw8bit": BLOCKS,
    "documents": DOCUMENTS,
}
PAIRED = {
    "muon": "dualpipe_v,zero2",
    "adapters": "dualpipe_v,full",
    "fp8": "dualpipe_v",
    "adamw8bit": "dualpipe_v,zero3",
    "documents": "dualpipe_v,selective",
}
"""Capability -> words of its layout."""


def longer(**options: Any) -> dict[str, Any]:
    """Samples for whose parts on a rank the search for layers that mix tokens has a prime."""
    return {
        "data": {"sequence_length": 32},
        "model.options": {"max_sequence_length": 32, "moe": BALANCED | options},
    }


def config_of(name: str, sections: dict[str, Any]) -> RunConfig:
    """Return a model of experts, with other values in some sections."""
    tree = model(name).model_dump()
    for section, keys in sections.items():
        place = tree["model"]["options"] if section == "model.options" else tree[section]
        place |= keys
    return RunConfig.model_validate(tree)


CASES = [
    pytest.param("sparse", "dp4,ep2,zero2", MUON, id="muon"),
    pytest.param("deepseek", "dp2,tp2,ep2,sequence,zero3", MOONLIGHT, id="muon-tp"),
    LATER("mixtral", "dp2,pp2,ep2,zb_v,zero1", MUON, id="muon-zb_v"),
    LATER("mixtral", "dp4,tp2,ep4,shard2,sequence,zero2,step", MUON, id="muon-shard2"),
    LATER("mixtral", "tp2,dp2,sequence,zero2", MUON, id="muon-without-ep"),
    LATER("deepseek", "dp2,ep2", {**MUON, **ADAPTERS}, id="muon-adapters"),
    LATER("mixtral", "cp2,ep2,mbs2", MOONLIGHT, id="muon-cp"),
    pytest.param("deepseek", "dp4,ep2,zero2,shard2", BLOCKS, id="adamw8bit"),
    LATER("mixtral", "dp2,tp2,ep4,sequence,zero3", BLOCKS, id="adamw8bit-tp"),
    LATER("mixtral", "dp2,ep2", {"optimizer": {"name": "lion"}}, id="lion"),
    LATER("mixtral", "dp2,ep2,zero2", {"optimizer": FREE}, id="schedule-free"),
    LATER(
        "deepseek", "dp2,ep2", {"optimizer": {"builder": "torch.optim:RAdam"}}, id="own-optimizer"
    ),
    pytest.param("deepseek", "dp2,tp2,ep4,sequence,zero3", ADAPTERS, id="adapters"),
    pytest.param("deepseek", "tp2,ep2,sequence,zero3", FLOAT8, id="fp8"),
    LATER("deepseek", "dp4,ep4,zero2", FROZEN, id="frozen-groups"),
    LATER("mixtral", "dp2,ep2,selective", {}, id="selective"),
    LATER("deepseek", "tp2,ep2,sequence,pointwise,zero3", {}, id="pointwise"),
    LATER("deepseek", "dp2,tp2,ep4,sequence,selective", {}, id="selective-tp"),
    pytest.param("mixtral", "cp2,ep2,mbs2,heads,documents", DOCUMENTS, id="heads-documents"),
    LATER("mixtral", "dp2,cp2,tp2,ep4,sequence,documents,zero3", DOCUMENTS, id="documents-tp"),
    LATER("mixtral", "dp2,ep2,full", OFFLOADED, id="offloaded-activations"),
    LATER("mixtral", "dp2,ep2,zero3,offload", {}, id="offload"),
    pytest.param("mixtral", "cp2,tp2,ep2,sequence", balanced(**LOSSES), id="balance"),
    pytest.param("mixtral", "cp2,ep2", longer(**LOSSES, capacity_factor=1.25), id="longer-cp"),
    LATER("mixtral", "dp2,cp2,pp2,ep2,dualpipe_v", longer(**LOSSES), id="longer-cp-dualpipe"),
    LATER("mixtral", "dp2,pp2,ep2,full", balanced(**LOSSES), id="balance-pp"),
    *[
        LATER("deepseek", f"dp2,pp2,ep2,{words}", BESIDE[of] | DEEP, id=f"dualpipe-{of}")
        for of, words in PAIRED.items()
    ],
    LATER("mixtral", "dp2,tp2,ep2,sequence,zero3,zb_h1", balanced(batch_loss=0.5), id="batch-loss"),
]


@marked_rows(
    "all_layouts", "muon", "muon-tp", "adamw8bit", "adapters", "fp8", "balance", "longer-cp"
)
@pytest.mark.parametrize(("name", "layout", "sections"), CASES)
def test_the_pair_has_the_numbers_of_one_process(
    name: str, layout: str, sections: dict[str, Any], pool: RankPool, references: References
) -> None:
    config, parsed = config_of(name, sections), parse_layout(layout)
    assert_agrees(config, parsed, pool, references, global_batch=8, steps=3)


@functools.cache
def with_batch_norm(micro_batch_size: int) -> Verification:
    config = config_of("mixtral", {"batch": {"micro_batch_size": micro_batch_size}})
    config = config.replace(model={"builder": "tests.framework.verify.normed_experts:build"})
    return Verification(config, global_batch=8, steps=2, random_tokens=True)


@pytest.mark.parametrize(
    "layout", ["dp2,ep2,mbs2", LATER("dp2,pp2,ep2,mbs2,zb_h1"), LATER("dp4,ep4,zero3,mbs2")]
)
def test_batch_norm_before_shared_experts(layout: str, pool: RankPool) -> None:
    row = with_batch_norm(2).compare_layout(parse_layout(layout), pool, is_repeated=False)
    assert row.passed, (row.problems, row.failure)
    assert with_batch_norm(2).traits.has_statistics and with_batch_norm(2).traits.couples_samples


@pytest.mark.parametrize("dtype", [long_row("bfloat16"), LATER("float16"), LATER("float32")])
def test_the_numbers_of_other_precisions(
    dtype: str, pool: RankPool, references: References
) -> None:
    assert_agrees(
        model("mixtral"),
        "dp2,ep2",
        pool,
        references,
        global_batch=8,
        steps=2,
        dtype=dtype,
        twice=True,
    )


@pytest.mark.all_layouts
@pytest.mark.parametrize(
    "layout", ["tp2,ep2,sequence", "dp2,pp2,ep2,full", "dp2,pp2,ep2,dualpipe_v"]
)
def test_compiled_layers(layout: str, pool: RankPool, references: References) -> None:
    config, parsed = model("deepseek", 4 if "dualpipe_v" in layout else 2), parse_layout(layout)
    compiled = layout_config(config, parsed, 8, "float64").replace(train={"compile": True})
    found = merge(
        pool.run(run_layout, parsed.size, compiled.model_dump_json(), 2, True, timeout_s=300.0)
    )
    expected = references.expected(config, 8, 2, "float64")
    assert compare(layout, found, None, expected.findings, TOLERANCES["float64"]).problems == []


# ---------------------------------------------------------------------------------------------------
# faults of matrices


def gate_and_up_as_one(matrices: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Gate and up of an expert are one matrix."""
    return {
        name: () if name.endswith("experts.gate_up") else rows for name, rows in matrices.items()
    }


def left_to_adamw(matrices: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Weights of three dims are stepped element by element."""
    return {name: rows for name, rows in matrices.items() if ".experts." not in name}


FAULTS = {each.__name__: each for each in (gate_and_up_as_one, left_to_adamw)}


def run_broken(rank: int, world_size: int, broken: str, config_json: str) -> RankFindings:
    found = meshwright.model.build.find_matrices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            meshwright.model.build, "find_matrices", lambda *args: FAULTS[broken](found(*args))
        )
        return run_layout(rank, world_size, config_json, 1, True)


@pytest.mark.parametrize("broken", ["gate_and_up_as_one", LATER("left_to_adamw")])
def test_another_choice_of_matrices_is_seen(
    broken: str, pool: RankPool, references: References
) -> None:
    config = config_of("sparse", MUON)
    expected = references.expected(config, 8, 1, "float64")
    text = layout_config(config, parse_layout("dp2,ep2"), 8, "float64").model_dump_json()
    found = merge(pool.run(run_broken, 2, broken, text))
    told = "\n".join(
        compare("dp2,ep2", found, None, expected.findings, TOLERANCES["float64"]).problems
    )
    assert "weights after 1 step" in told and "experts.gate_up" in told, told


# --------------------------------------------------------------------------------------------------------------
# refused


def test_adapters_of_experts_are_refused_by_name() -> None:
    sections = {"adapter": {"rank": 2, "targets": ["*.mlp.experts"]}}
    with raises("MW-MODEL-046", "block0.mlp.experts") as got:
        configured_model(config_of("mixtral", sections))
    assert got.value.code == "MW-MODEL-046"


class Normed(nn.Module):
    """Experts with a norm that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 8, 8))
        self.norm = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


def test_parameters_that_do_not_count_experts_are_refused() -> None:
    layers = nn.Sequential()
    layers.add_module("experts", Normed())
    infos = {
        name: ParameterInfo(name, tuple(each.shape)) for name, each in layers.named_parameters()
    }
    with raises("MW-EP-004", "up 4, norm 8") as got:
        meshwright.expert_parallel.plan.apply(
            "own", layers, {"experts": "experts"}, infos, Group("ep", (0, 1), 0)
        )
    assert got.value.code == "MW-EP-004"
