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
from meshwright.traits import traits_of
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.defaults import default_layouts
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
        ("dp2,zero3,unit2", {}),
        ("dp2,pp2,zero3,zb_h1,unit2,kept", {}),
        ("dp2,zero3,full,unit3,kept", {"keep_gathered": ["block*"]}),
        ("dp2,zero3,step,mbs2,kept", {"keep_gathered": ["block1", "head"]}),
        long_row("dp2,pp2,zero3,gpipe,pointwise,unit2,kept", {}),
        long_row("dp2,pp2,zero3,interleaved_1f1b,unit2,kept", {}),
        long_row("dp2,tp2,zero3,offload,unit2", {}),
        long_row("dp4,zero3,shard2,unit4,kept", {}),
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
    layout = parse_layout("dp2,zero3,kept")
    config = units("dp2,zero3,kept").replace(optimizer=optimizer)
    text = layout_config(config, layout, 8, "float64").model_dump_json()
    alone, validated = (pool.run(losses, 2, text, each)[0] for each in (False, True))
    assert alone == validated


@pytest.mark.parametrize(
    ("words", "units", "gathers"),
    [("", 5, 2), (",unit2", 3, 2), (",unit4,kept", 2, 1)],
)
def test_a_unit_is_one_message(words: str, units: int, gathers: int, pool: RankPool) -> None:
    """Of embedding, two blocks, norm and head; kept weights are gathered in forward alone."""
    config = model_config("llama", SIZE)
    chunks = SIZE.global_batch // 2
    for found in measured(config, f"dp2,zero3{words}", pool):
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
        draw_blueprint(layout_config(config, parse_layout("dp2,zero3,kept"), 4, "float32"))
    for key, code in (("unit_layers", "MW-CONFIG-104"), ("keep_gathered", "MW-CONFIG-105")):
        tree = {**PLAIN, "parallel": {key: 2 if key == "unit_layers" else True, "zero": 1}}
        with raises(code, "parallel.zero"):
            make_config(**tree)


@pytest.mark.parametrize(
    ("text", "unit_layers", "keep_gathered"),
    [
        ("dp2,zero3", 1, False),
        ("dp2,zero3,unit4", 4, False),
        ("dp2,zero3,kept", 1, ["head"]),
        ("dp2", 1, False),
    ],
)
def test_words_of_a_layout_set_both_keys(
    text: str, unit_layers: int, keep_gathered: bool | list[str]
) -> None:
    """Whatever units the configuration has; the layers that are kept are those that it names."""
    config = units(text, unit_layers=2, keep_gathered=["head"])
    found = layout_config(config, parse_layout(text), 4, "float32").parallel
    assert (found.unit_layers, found.keep_gathered) == (unit_layers, keep_gathered)
    layout = parse_layout(f"{text},mbs1")
    assert parse_layout(str(layout)) == layout
    assert (
        layout_config(
            units(text), parse_layout("dp2,zero3,kept"), 4, "float32"
        ).parallel.keep_gathered
        is True
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("dp2,unit2", "MW-CONFIG-104"),
        ("dp2,zero2,kept", "MW-CONFIG-105"),
        ("dp2,zero3,unit0", "MW-VERIFY-002"),
        ("dp2,pp2,zero3,dualpipe_v,unit2", "MW-CONFIG-106"),
    ],
)
def test_words_without_weights_to_gather_are_refused(text: str, code: str) -> None:
    with raises(code, *(["unit0"] if "unit0" in text else [])):
        layout_config(units("dp2"), parse_layout(text), 8, "float32")


@pytest.mark.long
def test_default_layouts_have_both() -> None:
    """Each where it shares code with another feature, beside layouts without."""
    config = units("dp2").replace(parallel={"unit_layers": 2, "zero": 3, "dp": 2})
    traits = traits_of(layout_config(config, parse_layout("dp1"), 8, "float32"))
    layouts = default_layouts(config, traits, 8, 4).layouts
    sharded = [layout for layout in layouts if layout.zero == 3 and layout.dp > 1]
    assert any(layout.unit_layers > 1 and layout.num_stages > 1 for layout in sharded)
    assert any(layout.keeps_gathered and layout.recompute == "full" for layout in sharded)
    assert any(layout.unit_layers == 1 and not layout.keeps_gathered for layout in sharded)
    assert any(layout.zero < 3 and layout.dp > 1 for layout in layouts)
    assert layouts[0].unit_layers == 2  # its own
