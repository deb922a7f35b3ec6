"""Muon in any layout against the plain run, the faults that others had with it,
and fused against split projections.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch import Tensor

import meshwright.model.build
import meshwright.optimizer.flat
import meshwright.optimizer.matrix
from meshwright.config import RunConfig
from meshwright.data_parallel.replica import BucketReplica
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.optimizer.matrix import ShardedMuon, newton_schulz
from meshwright.traits import left_out, traits_of
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.layouts import is_possible
from meshwright.verify.rank import merge, run_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    LATER,
    References,
    assert_agrees,
    config_of,
    model_config,
    problems_of,
    size_for,
)
from tests.support.errors import raises
from tests.support.fused_attention import fused_from
from tests.support.marks import all_layouts_row, mark_all_rows_but, marked_rows
from tests.support.run import Break, nothing


def with_muon(config: RunConfig, **more: Any) -> RunConfig:
    own = {"name": "muon", "learning_rate": 1e-2, **more}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=own)})


CASES = [
    ("gpt2", "dp2,zero0", "float64"),
    ("gpt2", "dp2,pp2,zb_v,zero2", "float64"),
    ("llama", "dp2,pp2,tp2,zb_h1,zero3,sequence,full,mbs2", "float64"),
    ("llama", "dp4,tp2,shard2,zero2,step", "float64"),
    ("llama", "tp4,gpipe", "float64"),
    ("t5", "tp2,sequence,pp2", "float64"),
    ("gpt2", "tp2", "float32"),
    ("llama", "dp2,zero3", "bfloat16"),
]
MORE = [
    *(
        (model, f"dp{dp},tp{tp},zero{zero}")
        for model in ("gpt2", "llama", "t5")
        for dp, tp, zero in [(2, 2, 3), (4, 2, 1)]
    ),
    ("gpt2", "dp2,pp2,tp2,interleaved_1f1b,zero0,sequence,full"),
    ("gpt2", "dp2,pp4,gpipe,zero2,step,full"),
    ("llama", "dp4,pp2,zb_v,zero3,shard2,selective"),
    ("llama", "dp2,pp2,tp2,zb_h2,zero1,sequence"),
    ("llama", "dp2,tp3,gpipe,mbs2"),
    ("gpt2", "dp3,pp2,zero0"),
    ("llama", "dp3,zero1"),
    ("llama", "dp8,zero1"),
]


@marked_rows(
    "all_layouts",
    "gpt2-dp2,pp2,zb_v,zero2-float64",
    "llama-dp2,pp2,tp2,zb_h1,zero3,sequence,full,mbs2-float64",
    "llama-dp4,tp2,shard2,zero2,step-float64",
    "llama-tp4,gpipe-float64",
    "t5-tp2,sequence,pp2-float64",
    "gpt2-tp2-float32",
    "llama-dp2,zero3-bfloat16",
)
@pytest.mark.parametrize(
    ("model", "layout", "dtype"), [*CASES, *(LATER(*case, "float64") for case in MORE)]
)
def test_the_layout_gives_the_numbers_of_one_process(
    model: str, layout: str, dtype: str, pool: RankPool, references: References
) -> None:
    size = size_for(parse_layout(layout))
    assert_agrees(
        with_muon(
            model_config(model, size), scale="spectral" if "zero2" in layout else "match_rms_adamw"
        ),
        layout,
        pool,
        references,
        global_batch=size.global_batch,
        steps=3,
        dtype=dtype,
        twice=dtype == "float32",
    )


@pytest.mark.all_layouts
@pytest.mark.parametrize(("model", "layout", "dtype"), CASES)
def test_the_numbers_stay_so_over_ten_steps(
    model: str, layout: str, dtype: str, pool: RankPool, references: References
) -> None:
    size, parsed = size_for(parse_layout(layout)), parse_layout(layout)
    config = with_muon(model_config(model, size))
    assert_agrees(
        config,
        parsed,
        pool,
        references,
        global_batch=size.global_batch,
        steps=10,
        dtype=dtype,
        twice=True,
    )


# ------------------------------------------------------------------------------------------------------
# other features

LORA = {"rank": 3, "alpha": 6.0, "targets": ["*.attention.qkv", "*.mlp.*"]}
GROUPS = [
    {"names": ["block0.mlp.*"], "frozen": True},
    {"names": ["block1.*"], "learning_rate_factor": 0.5, "weight_decay": 0.0},
]
FEATURES = [
    LATER(
        "llama",
        "dp2,tp2,zero2",
        "float64",
        {"train": {"linear": "fp8", "fp8_keep": ["head"]}},
        id="fp8",
    ),
    pytest.param("llama", "dp2,tp2", "float64", {"adapter": LORA}, id="adapters"),
    LATER("gpt2", "dp2,pp2,zero3", "float64", {"adapter": LORA}, id="adapters-zero3"),
    pytest.param(
        "llama",
        "dp2,pp2,zb_h1",
        "float64",
        {"model": {"parameter_groups": GROUPS}},
        id="groups-and-frozen",
    ),
    LATER("gpt2", "dp2,pp2,tp2,zb_v,sequence", "float64", {}, id="tied"),
    LATER("gpt2", "dp2,tp2", "float16", {}, id="float16"),
]


@marked_rows("all_layouts", "adapters")
@pytest.mark.parametrize(("model", "layout", "dtype", "sections"), FEATURES)
def test_it_composes_with_other_features(
    model: str,
    layout: str,
    dtype: str,
    sections: dict[str, Any],
    pool: RankPool,
    references: References,
) -> None:
    """A and B of an adapter are matrices, float8 products have gradients like others,
    frozen weights have none.
    """
    size = size_for(parse_layout(layout))
    tree = with_muon(model_config(model, size)).model_dump()
    for section, keys in sections.items():
        tree[section] = {**tree[section], **keys}
    config = RunConfig.model_validate(tree)
    parsed = parse_layout(layout)
    assert_agrees(
        config, parsed, pool, references, global_batch=size.global_batch, steps=3, dtype=dtype
    )


def test_layouts_with_offload_are_left_out_and_refused() -> None:
    layout, size = parse_layout("dp2,offload"), size_for(parse_layout("dp2"))
    for name, is_offloaded in (("adamw", True), ("muon", False)):
        config = with_muon(model_config("gpt2", size), name=name)
        traits = traits_of(config)
        assert is_possible(layout, traits, size.global_batch, size.sequence_length) == is_offloaded
        assert any("offload" in reason for reason in left_out(traits)) != is_offloaded
    with raises("MW-CONFIG-067", "dp2"):
        layout_config(config, layout, size.global_batch, "float64")


# ---------------------------------------------------------------------------------------------------------------
# traps


def on_a_shard(patch: pytest.MonkeyPatch) -> None:
    """Each tp rank's part of a matrix is orthogonalised by itself,
    and put where the whole would be.
    """

    def of_parts(matrix: Tensor, steps: int) -> Tensor:
        return torch.cat([newton_schulz(part, steps) for part in matrix.chunk(2)])

    patch.setattr(meshwright.optimizer.matrix, "newton_schulz", of_parts)


def per_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """The gradient of each micro-batch is orthogonalised before it is added to the others."""
    accumulated = BucketReplica._accumulated

    def orthogonal(
        reference: ref[BucketReplica], parameter: Tensor, *, index: int, number: int
    ) -> None:
        replica = reference()
        assert replica is not None
        if parameter.grad is not None and replica.buckets[index].kind.is_matrix:
            parameter.grad = newton_schulz(parameter.grad, 5)
        accumulated(reference, parameter, index=index, number=number)

    patch.setattr(BucketReplica, "_accumulated", orthogonal)


def on_the_raw_gradient(patch: pytest.MonkeyPatch) -> None:
    """The momentum is kept and saved, and the gradient alone is orthogonalised."""
    moment = ShardedMuon._moment

    def raw(optimizer: ShardedMuon, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        gradient = parameter.grad.clone()
        moment(optimizer, parameter)
        return gradient

    patch.setattr(ShardedMuon, "_moment", raw)


def with_qkv_as_one(patch: pytest.MonkeyPatch) -> None:
    """The declaration of the model is not read."""
    found = meshwright.model.build.find_matrices
    patch.setattr(
        meshwright.model.build, "find_matrices", lambda *args: dict.fromkeys(found(*args), ())
    )


def on_the_head_too(patch: pytest.MonkeyPatch) -> None:
    """Embedding and head are matrices like any other."""
    found = meshwright.model.build.find_matrices

    def all_of_them(layers: Any, *more: Any) -> dict[str, tuple[int, ...]]:
        return found(layers, *more) | {"head.weight": (), "embedding.tokens.weight": ()}

    patch.setattr(meshwright.model.build, "find_matrices", all_of_them)


def without_clipping(patch: pytest.MonkeyPatch) -> None:
    """Gradients enter the momentum as they are, unclipped."""
    step = FlatOptimizer.step
    patch.setattr(FlatOptimizer, "step", lambda optimizer, rate, factor: step(optimizer, rate, 1.0))


def another_home_s_update(patch: pytest.MonkeyPatch) -> None:
    """The updates of two matrices of one home are exchanged on their way back."""
    orthogonalise = meshwright.optimizer.matrix.MatrixExchange.orthogonalise

    def swapped(exchange: Any, steps: int) -> Any:
        handle = orthogonalise(exchange, steps)
        handle.wait()
        exchange._sent = exchange._sent.flip(0)
        return handle

    patch.setattr(meshwright.optimizer.matrix.MatrixExchange, "orthogonalise", swapped)


class MuonTrap(NamedTuple):
    """A fault, a layout that must see it, and what must be named first."""

    broken: Break
    layout: str
    said: str
    steps: int = 3


WEIGHTS = "weights after 3 steps differ"
TRAPS = [
    MuonTrap(on_a_shard, "tp2", f"{WEIGHTS} in"),
    MuonTrap(per_micro_batch, "dp2", "gradients of step 1 differ"),
    MuonTrap(on_the_raw_gradient, "dp2,zero2", f"{WEIGHTS} in"),
    MuonTrap(
        with_qkv_as_one,
        "dp2,tp2",
        "differ in 4 of 15 parameters, first block0.attention.qkv.weight",
        steps=1,
    ),
    MuonTrap(on_the_head_too, "dp2", "first embedding.tokens.weight"),
    MuonTrap(without_clipping, "dp2", f"{WEIGHTS} in"),
    MuonTrap(another_home_s_update, "dp2,tp2", f"{WEIGHTS} in"),
]


def problems_with(trap: MuonTrap, pool: RankPool, references: References) -> list[str]:
    size = size_for(parse_layout("dp2,tp2"))
    config = with_muon(model_config("llama", size), clip_norm=0.05)
    batch = size.global_batch
    return problems_of(
        config, trap.layout, trap.broken, pool, references, global_batch=batch, steps=trap.steps
    )


@mark_all_rows_but("all_layouts", "without_clipping")
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.broken.__name__)
def test_the_fault_is_seen_and_named(
    trap: MuonTrap, pool: RankPool, references: References
) -> None:
    problems = problems_with(trap, pool, references)
    assert any(trap.said in problem for problem in problems), problems


def test_without_a_fault_nothing_is_said(pool: RankPool, references: References) -> None:
    assert problems_with(MuonTrap(nothing, "dp2,tp2", ""), pool, references) == []


# ------------------------------------------------------------------------------------------------------
# fused and split


def trained(fused: bool, layout: str, pool: RankPool) -> dict[str, Tensor]:
    """Return the weights after four steps."""
    config = with_muon(config_of("tests.support.fused_attention:build", {"fused": fused}, 8))
    parsed = parse_layout(layout)
    text = layout_config(config, parsed, 8, "float64").model_dump_json()
    return merge(pool.run(run_layout, parsed.size, text, 4, True)).weights


@pytest.mark.parametrize("layout", ["dp2", all_layouts_row("dp2,tp2,zero3")])
def test_one_linear_for_q_k_and_v_is_trained_as_three(layout: str, pool: RankPool) -> None:
    one, three = trained(True, layout, pool), trained(False, layout, pool)
    for block in ("block0", "block1"):
        parts = [three[f"{block}.{name}.weight"] for name in "qkv"]
        torch.testing.assert_close(
            one[f"{block}.qkv.weight"], fused_from(parts), rtol=1e-10, atol=1e-11
        )
    torch.testing.assert_close(
        one["embedding.weight"], three["embedding.weight"], rtol=1e-10, atol=1e-11
    )
