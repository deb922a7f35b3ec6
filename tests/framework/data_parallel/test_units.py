"""Units of several layers under ZeRO-3, and weights that stay gathered: the same numbers, and the
messages that the configuration asks for.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import make_config
from meshwright.blueprint import draw_blueprint
from meshwright.build import build
from meshwright.config import RunConfig, parse
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.optimizer.states import evaluating
from meshwright.run.observers import total_loss
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, model_config, size_for
from tests.framework.verify.test_wire_bytes import SIZE, measured
from tests.support.errors import raises
from tests.support.marks import long_row

PLAIN = {
    "model": {"builder": "tests.support.builders:plain"},
    "data": {"train": "nothing", "sequence_length": 8},
    "batch": {"micro_batch_size": 1, "global_batch": 4},
    "train": {"steps": 1, "device": "cpu"},
}


def units(layout: str, **parallel: Any) -> RunConfig:
    return model_config("gpt2", size_for(parse_layout(layout))).replace(parallel=parallel)


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("dp2,zero3", {"unit_layers": 2}),
        ("dp2,pp2,zero3,zb_h1", {"unit_layers": 2, "keep_gathered": True}),
        ("dp2,zero3,full", {"unit_layers": 3, "keep_gathered": ["block*"]}),
        ("dp2,zero3,step,mbs2", {"keep_gathered": ["block1", "head"]}),
        long_row("dp2,pp2,zero3,gpipe,pointwise", {"unit_layers": 2, "keep_gathered": True}),
        long_row("dp2,pp2,zero3,interleaved_1f1b", {"unit_layers": 2, "keep_gathered": True}),
        long_row("dp2,tp2,zero3,offload", {"unit_layers": 2}),
        long_row("dp4,zero3,shard2", {"unit_layers": 4, "keep_gathered": True}),
    ],
)
def test_layouts_agree(layout: str, parallel: dict[str, Any], pool: RankPool) -> None:
    size = size_for(parse_layout(layout))
    config = units(layout, **parallel)
    assert_agrees(
        config, layout, pool, References(), global_batch=size.global_batch, steps=3, twice=True
    )


def losses(rank: int, world_size: int, config_json: str, validates: bool) -> list[float]:
    """Train four steps, with validations between them if ``validates``; return the losses."""
    config = parse(config_json)
    source = open_verify_source(config, True)
    parts = build(config, open_mesh(Grid.of(config.parallel.degrees), "cpu"), (source, {}))
    found = []
    for _ in range(4):
        found.append(take_step(parts).loss)
        if validates:
            with evaluating(parts.optimizer):
                total_loss(parts, parts.feeds(source, [9]))
    return found


def test_weights_that_a_validation_has_gathered_do_not_outlive_it(pool: RankPool) -> None:
    """Schedule-free AdamW validates with other weights than it trains."""
    optimizer = {"name": "schedule_free_adamw", "schedule": "constant", "min_learning_rate": None}
    layout = parse_layout("dp2,zero3")
    config = units("dp2,zero3", keep_gathered=True).replace(optimizer=optimizer)
    text = layout_config(config, layout, 8, "float64").model_dump_json()
    alone, validated = (pool.run(losses, 2, text, each)[0] for each in (False, True))
    assert alone == validated


@pytest.mark.parametrize(
    ("parallel", "units", "gathers"),
    [({}, 5, 2), ({"unit_layers": 2}, 3, 2), ({"unit_layers": 4, "keep_gathered": True}, 2, 1)],
)
def test_a_unit_is_one_message(
    parallel: dict[str, Any], units: int, gathers: int, pool: RankPool
) -> None:
    """Of embedding, two blocks, norm and head; kept weights are gathered in forward alone."""
    config = model_config("llama", SIZE).replace(parallel=parallel)
    chunks = SIZE.global_batch // 2
    for found in measured(config, "dp2,zero3", pool):
        message = sum(found.bucket_bytes)
        calls, wire_bytes = found.own["dp", "all_gather"]
        assert calls == gathers * chunks * units
        assert wire_bytes == pytest.approx(gathers * chunks * message / 2, rel=1e-12)
        calls, wire_bytes = found.own["dp", "reduce_scatter"]
        assert calls == chunks * units
        assert wire_bytes == pytest.approx(chunks * message / 2, rel=1e-12)


def test_patterns_fit_layers_and_weights_are_sharded() -> None:
    config = units("dp2,zero3", keep_gathered=["blok*"])
    with raises("MW-PLACEMENT-001", "parallel.keep_gathered", "'blok*'"):
        draw_blueprint(layout_config(config, parse_layout("dp2,zero3"), 4, "float32"))
    for key, code in (("unit_layers", "MW-CONFIG-104"), ("keep_gathered", "MW-CONFIG-105")):
        tree = {**PLAIN, "parallel": {key: 2 if key == "unit_layers" else True, "zero": 1}}
        with raises(code, "parallel.zero"):
            make_config(**tree)
