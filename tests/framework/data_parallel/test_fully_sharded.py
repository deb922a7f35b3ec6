"""Stages that torch's fully_shard cuts: hard models, what is gathered at once, what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from meshwright.build import build
from meshwright.config import RunConfig, parse
from meshwright.data_parallel.fully_sharded import FullyShardedReplica
from meshwright.errors import ModelError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    LATER,
    References,
    assert_agrees,
    config_of,
    model_config,
    size_for,
)
from tests.support.marks import long_row, torture_row

S = 8


def of_kind(kind: str) -> RunConfig:
    return config_of("tests.framework.data_parallel.builders:of_kind", {"kind": kind}, S)


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [
        torture_row("Sometimes", "dp2,zero1", "float64"),  # the model itself can be proven
        ("Sometimes", "dp2,zero2", "float64"),
        torture_row("Sometimes", "dp2,zero3", "float64"),
        long_row("Sometimes", "dp2,zero3,step", "bfloat16"),
        long_row("Sometimes", "dp4,pp2,zero3,shard2,zb_h1", "float64"),
        long_row("PartlyFrozen", "dp2,pp2,zero3,zb_h1", "float64"),
        ("Strided", "dp2,zero3", "float64"),
        long_row("Empty", "dp2,zero2", "float64"),
    ],
)
def test_gradients_that_only_some_have(kind: str, layout: str, dtype: str, pool: RankPool) -> None:
    """Replicas whose data take another way say the same all the same,
    and no dtype meets another in a sum.
    """
    config, laid_out = of_kind(kind), parse_layout(layout)
    assert_agrees(config, laid_out, pool, References(), global_batch=8, steps=3, dtype=dtype)


@pytest.mark.parametrize(
    "layout",
    [
        long_row("dp2,pp2,zero3,zb_h1"),
        LATER("dp2,pp2,zero3,zb_v"),
        "dp2,zero3,step",
        LATER("dp4,zero3,shard2"),
    ],
)
def test_bfloat16_is_summed_in_float32(layout: str, pool: RankPool) -> None:
    """Halves of a backward leave some gradients in bfloat16 and some in float32;
    there the bars are wide.
    """
    size = size_for(parse_layout(layout))
    config = model_config("gpt2", size)
    assert_agrees(
        config,
        layout,
        pool,
        References(),
        global_batch=size.global_batch,
        steps=2,
        dtype="bfloat16",
    )


def gradients(
    rank: int, world_size: int, config_json: str
) -> tuple[dict[str, list[float]], list[str]]:
    """Take a step. Return the summed gradients of this rank's rows,
    and parameters with a 16-bit sum after a W.
    """
    config = parse(config_json)
    parts = build(
        config, open_mesh(Grid(pp=2, dp=2), "cpu"), (open_verify_source(config, True), {})
    )
    [replica], [stage] = parts.replicas.values(), parts.executor.stages.values()
    assert isinstance(replica, FullyShardedReplica)
    narrow: list[str] = []
    accumulate = stage.backward_weight

    def backward_weight(microbatch: int) -> None:
        accumulate(microbatch)
        if not replica.fsdp.is_reduction_due:
            narrow.extend(
                each.slots[0].member.info.name
                for each in replica.buckets
                if each.gradient_of(each.slots[0]).dtype is torch.bfloat16
            )

    stage.backward_weight = backward_weight  # type: ignore[method-assign]
    take_step(parts)
    return {
        each.slots[0].member.info.name: each.shard_gradient.tolist() for each in replica.buckets
    }, narrow


@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_weight_gradients_that_follow_each_other_are_summed_in_float32(
    reduce: str, pool: RankPool
) -> None:
    """Halves of a backward have the sums of whole ones, bit for bit;
    zb_h2 has several Ws in a row.
    """
    size = size_for(parse_layout("dp2,pp2"))
    found = []
    for schedule in ("1f1b", "zb_h2"):
        layout = parse_layout(f"dp2,pp2,zero3,{schedule}" + (",step" if reduce == "step" else ""))
        config = layout_config(model_config("gpt2", size), layout, 16, "bfloat16")
        results = pool.run(gradients, 4, config.model_dump_json())
        assert not any(narrow for _, narrow in results)
        found.append([sums for sums, _ in results])
    assert found[0] == found[1]


class Gathered(NamedTuple):
    """Elements."""

    most: int
    """At once, in a step."""
    largest_pair: int
    """Of a layer and the one after it."""
    shared: int
    """Of weights that several layers share."""
    whole: int


def gathered(rank: int, world_size: int, config_json: str) -> Gathered:
    """Of one stage."""
    config = parse(config_json)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    parts = build(
        config,
        open_mesh(Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp), "cpu"),
        (open_verify_source(config, True), {}),
    )
    [replica] = parts.replicas.values()
    units: list[Any] = list(replica.fsdp.units())  # type: ignore[attr-defined]
    sizes = {
        id(unit): sum(of_torch._orig_size.numel() for of_torch in unit.fsdp_params)
        for unit in units
    }
    most = 0

    def counting(unit: Any) -> Any:
        gather = unit._to_unsharded

        def run() -> None:
            nonlocal most
            gather()
            most = max(most, sum(sizes[id(each)] for each in units if each.is_unsharded))

        return run

    for unit in units:
        unit._to_unsharded = counting(unit)
    take_step(parts)
    shared = sum(sizes[id(unit)] for unit in units if len(unit.modules) > 1)
    single = [sizes[id(unit)] for unit in units if len(unit.modules) == 1]
    return Gathered(most, sum(sorted(single)[-2:]), shared, sum(sizes.values()))


@pytest.mark.parametrize("model", ["gpt2", long_row("t5")])
def test_what_is_gathered_at_once(model: str, pool: RankPool) -> None:
    """A layer or two, and what is shared among layers; not all layers that share a weight."""
    layout = parse_layout("dp2,zero3")
    size = size_for(layout)._replace(num_blocks=6)
    config = layout_config(model_config(model, size), layout, size.global_batch, "float32")
    for found in pool.run(gathered, 2, config.model_dump_json()):
        assert 0 < found.shared < found.whole / 2
        assert found.most <= found.shared + found.largest_pair < found.whole
        assert found.most < 0.7 * found.whole


def built(rank: int, world_size: int, config_json: str, steps: int) -> str:
    """Return the error that it ends in."""
    config = parse(config_json)
    try:
        parts = build(
            config,
            open_mesh(Grid(dp=world_size), "cpu"),
            (open_verify_source(config, True), {}),
        )
        for _ in range(steps):
            take_step(parts)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("Empty", "the parameter 1.weight of shape (0, 8)"),
        long_row("Scale", "the parameter 1.factor"),
        ("Uncalled", "layer 1 uses a weight that several modules share"),
        long_row("InPlace", "layer 1 changes its input in place"),
    ],
)
def test_what_cannot_be_sharded_is_refused(kind: str, value: str, pool: RankPool) -> None:
    for zero in (2, 3):
        config = layout_config(of_kind(kind), parse_layout(f"dp2,zero{zero}"), 8, "float32")
        for message in pool.run(built, 2, config.model_dump_json(), 1):
            assert value in message and "[MW-" in message if zero == 3 else message == ""
