"""More tp ranks than key-value heads: the numbers of one process in any layout,
and faults that could hide there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import meshwright.build
import meshwright.tensor_parallel.shared_units
from meshwright.config import RunConfig
from meshwright.data_parallel.sharding import StageParameter
from meshwright.mesh.holders import Holders
from meshwright.optimizer.flat import OptimizerShard
from meshwright.tensor_parallel.shared_units import _CopiedParts, _exchange
from meshwright.verify import compare, layout_config, parse_layout
from meshwright.verify.rank import RankFindings, merge, run_layout
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    LATER,
    VOCAB_SIZE,
    References,
    assert_agrees,
    config_of,
    prove,
)
from tests.support.marks import long_row, marked_rows


def few_heads(
    num_kv_heads: int, layout: str, optimizer: dict[str, Any] | None = None, **options: Any
) -> RunConfig:
    """Eight query heads on one or two key-value heads, and as many blocks of gate and up rows."""
    num_layers = max(2, parse_layout(layout).num_stages - 3)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "num_layers": num_layers,
        "max_sequence_length": 8,
        "hidden_size": 16,
    }
    heads = {"num_heads": 8, "num_kv_heads": num_kv_heads, "head_dim": 8, "ffn_size": 64}
    own = {"optimizer": {"warmup_steps": 2, **(optimizer or {})}}
    return config_of("meshwright_models.llama:build", sizes | heads | options, 8, **own)


DROPS, NORMS = {"dropout": 0.1, "qkv_bias": True}, {"qk_norm": True, "mlp_bias": True}
MUON, BLOCKS = (
    {"optimizer": {"name": "muon"}},
    {"optimizer": {"name": "adamw8bit", "block_size": 8}},
)
ROUNDED = {"optimizer": {"state_dtype": "bfloat16"}}
CASES = [
    (2, "tp4,sequence", DROPS | NORMS),
    (1, "pp2,tp2,zb_v,sequence,full", DROPS),
    (1, "dp2,tp2,zero3", MUON),
]
MORE: list[tuple[int, str, dict[str, Any]]] = [
    (1, "tp2", DROPS),
    (2, "tp4", {}),
    (2, "dp2,tp4,zero3,sequence", NORMS),
    (1, "pp2,tp4,zb_v,sequence,full", DROPS),
    (2, "dp2,tp4,zero1", MUON),
    (1, "tp8,sequence", NORMS),
    (2, "tp8", DROPS),
    (2, "dp2,tp4,zero0", DROPS | NORMS),
    (1, "dp2,tp4,zero2,selective,mbs2", DROPS),
    (2, "pp2,tp4,zb_h1", NORMS),
    (1, "pp4,tp2,interleaved_1f1b,sequence", DROPS),
    (1, "dp2,pp2,tp2,zero3,gpipe", NORMS),
    (2, "pp2,tp4,v_half,selective", DROPS),
    (1, "dp4,tp2,zero2,shard2,step", {}),
    (1, "dp2,tp4,zero3,sequence", MUON),
    (1, "dp2,tp4,zero2", BLOCKS),
    (2, "dp2,tp4,zero1", ROUNDED),
    (1, "tp2,sequence", {"mtp_layers": 1}),
    (2, "tp4", {"sliding_window": 3, "tied": True}),
]


@marked_rows("all_layouts", "2-tp4,sequence-options0", "1-dp2,tp2,zero3-options2")
@pytest.mark.parametrize(("heads", "layout", "options"), [*CASES, *(LATER(*case) for case in MORE)])
def test_the_layout_gives_the_numbers_of_one_process(
    heads: int, layout: str, options: dict[str, Any], pool: RankPool, references: References
) -> None:
    config, chosen = few_heads(heads, layout, **options), parse_layout(layout)
    global_batch = 4 * chosen.dp * chosen.micro_batch_size
    assert_agrees(config, chosen, pool, references, global_batch=global_batch, steps=2)


@pytest.mark.parametrize(("heads", "dtype"), [LATER(1, "float32"), LATER(2, "bfloat16")])
def test_in_fewer_bits_too_and_twice_alike(
    heads: int, dtype: str, pool: RankPool, references: References
) -> None:
    config, layout = few_heads(heads, "tp4,sequence", **DROPS), parse_layout("tp4,sequence")
    assert prove(config, layout, pool, references, global_batch=4, steps=3, dtype=dtype).passed


ADAPTER = {
    "rank": 3,
    "alpha": 8.0,
    "targets": ["block*.attention.*", "block*.mlp.*"],
    "dropout": 0.1,
}


@pytest.mark.parametrize(
    ("heads", "layout"), [long_row(1, "tp2,sequence"), LATER(2, "dp2,tp4,zero3")]
)
def test_adapters_beside_them(
    heads: int, layout: str, pool: RankPool, references: References
) -> None:
    config, chosen = few_heads(heads, layout).replace(adapter=ADAPTER), parse_layout(layout)
    assert_agrees(config, chosen, pool, references, global_batch=4 * chosen.dp, steps=2)


# ---------------------------------------------------------------------------------------------------------------
# traps


def not_summed(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each sharer keeps the gradient that its own query heads give to its share
    of the keys and values.
    """

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = (
            gradient[..., ctx.own :]
            .reshape(*gradient.shape[:-1], *ctx.parts)
            .movedim(-2, 0)
            .flatten(-2)
        )
        share = parts[ctx.group.rank % len(parts)]
        return torch.cat((gradient[..., : ctx.own], share), dim=-1), None, None, None, None

    patch.setattr(_CopiedParts, "backward", staticmethod(backward))


def summed_twice(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The weights' gradients are summed over tp besides, as those of copies would be."""

    stage_members = meshwright.build.stage_members

    def also_over_tp(member: StageParameter) -> StageParameter:
        holders = member.holders
        if holders.slices.size == 1 or not member.info.name.endswith("qkv.weight"):
            return member
        return member._replace(holders=holders._replace(partial_over=(holders.slices,)))

    def summed(*arguments: Any, **more: Any) -> list[StageParameter]:
        return [also_over_tp(member) for member in stage_members(*arguments, **more)]

    patch.setattr(meshwright.build, "stage_members", summed)


def norm_of_one_sharer(patch: pytest.MonkeyPatch, rank: int) -> None:
    """One rank of each unit counts its part in the gradient norm, as if the others had copies."""
    is_counted = Holders.is_counted.fget
    assert is_counted is not None

    def one_counts(shard: OptimizerShard) -> bool:
        return is_counted(shard.layout.holders) and rank % 2 == 0

    patch.setattr(OptimizerShard, "is_counted", property(one_counts))


def shares_of_others_first(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The shares arrive in another order than they lie in a head."""
    patch.setattr(
        meshwright.tensor_parallel.shared_units, "_exchange", lambda *args: _exchange(*args).flip(0)
    )


def nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The framework as it is."""


class Trap(NamedTuple):
    """A fault, and what must be named."""

    broken: Callable[[pytest.MonkeyPatch, int], None]
    said: str


QKV = "block0.attention.qkv.weight"
TRAPS = [
    Trap(
        not_summed,
        "gradients of step 1 differ in 9 of 15 parameters, first embedding.tokens.weight",
    ),
    Trap(summed_twice, f"gradients of step 1 differ in 2 of 15 parameters, first {QKV}"),
    Trap(norm_of_one_sharer, "gradient norm of step 1"),
    Trap(shares_of_others_first, "loss of step 1 is"),
]
BREAKS = {trap.broken.__name__: trap.broken for trap in (*TRAPS, Trap(nothing, ""))}


def run_broken(rank: int, world_size: int, broken: str, config_json: str) -> RankFindings:
    """Run one rank in a framework with one fault."""
    with pytest.MonkeyPatch.context() as patch:
        BREAKS[broken](patch, rank)
        return run_layout(rank, world_size, config_json, 1, True)


def problems_of(trap: Trap, pool: RankPool, references: References) -> list[str]:
    config = few_heads(1, "tp2")
    expected = references.expected(config, 4, 1, "float64")
    text = layout_config(config, parse_layout("tp2"), 4, "float64").model_dump_json()
    found = merge(pool.run(run_broken, 2, trap.broken.__name__, text))
    return compare("tp2", found, None, expected.findings, TOLERANCES["float64"]).problems


@marked_rows("all_layouts", "not_summed")
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.broken.__name__)
def test_the_fault_is_seen_and_named(trap: Trap, pool: RankPool, references: References) -> None:
    problems = problems_of(trap, pool, references)
    assert any(trap.said in problem for problem in problems), problems


def test_without_a_fault_nothing_is_said(pool: RankPool, references: References) -> None:
    assert problems_of(Trap(nothing, ""), pool, references) == []
