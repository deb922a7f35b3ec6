"""Models that a pipeline could get wrong without a word: the same numbers,
or a message that says what to do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.schedule.build import build
from meshwright.schedule.load import format_schedule
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import run_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of
from tests.support.errors import raises
from tests.support.marks import all_layouts_row

LENGTH = 6


def hard(name: str = "build", **options: str) -> RunConfig:
    return config_of(f"tests.support.hard_models:{name}", {"vocab_size": 13, **options}, LENGTH)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"layer": "Overwriting"}, "pp2"),
        ({"layer": "Overwriting"}, "pp2,full"),
        all_layouts_row({"layer": "Overwriting"}, "dp2,pp2,zb_h1,full"),
        ({"how": "vmap"}, "pp2,zb_h1"),
        ({"how": "vector"}, "pp2,zb_h1"),
        ({"how": "gradient within"}, "pp2,zb_h1"),
        ({"how": "checkpoint"}, "pp2,1f1b"),
    ],
)
def test_the_numbers_of_one_process(
    options: dict[str, str], layout: str, pool: RankPool, references: References
) -> None:
    assert_agrees(hard(**options), layout, pool, references, global_batch=4, steps=2)


@pytest.mark.parametrize("layout", ["dp2,zero3", all_layouts_row("dp2,pp2,zero3,zb_h1")])
def test_layers_that_share_a_module(layout: str, pool: RankPool, references: References) -> None:
    """Within a stage ZeRO-3 gathers it once for both."""
    config = hard("shared_submodule")
    assert_agrees(config, layout, pool, references, global_batch=4, steps=2)


@pytest.mark.parametrize("how", ["relu", "mul", "rows"])
def test_outputs_are_changed_in_place_under_a_split_backward(
    how: str, pool: RankPool, references: References
) -> None:
    """What a linear or an embedding returns is the layer's own to write into, as in plain torch."""
    config = hard("in_place", how=how)
    assert_agrees(config, "pp2,zb_h1", pool, references, global_batch=4, steps=2)


@pytest.mark.parametrize("dtype", ["float64", all_layouts_row("float32")])
def test_frozen_statistics_are_constants(
    dtype: str, pool: RankPool, references: References
) -> None:
    """Of a norm in eval mode; any number of replicas, since nothing changes them."""
    assert_agrees(
        hard("frozen_norm"),
        "dp2,pp2",
        pool,
        references,
        global_batch=4,
        steps=2,
        dtype=dtype,
        twice=True,
    )


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("frozen", "MW-MODEL-007", "no parameter"),
        ("sparse", "MW-MODEL-011", "0.table is a Embedding"),
        ("reduced_loss", "MW-PIPELINE-033", "labels of shape (1, 6)"),
        ("no_forward", "MW-PIPELINE-031", "layer 1 (Module)"),
        ("own_tensor", "MW-PIPELINE-031", "layer 1 (OwnTensor)"),
    ],
)
def test_refused_before_anything_runs(name: str, code: str, value: str) -> None:
    with raises(code, value):
        draw_blueprint(layout_config(hard(name), parse_layout("pp2"), 4, "float64"))


@pytest.mark.parametrize(
    ("options", "layout", "code", "value"),
    [
        ({"layer": "Fickle", "how": "dtype"}, "pp2", "MW-PIPELINE-015", "(1, 6, 8) float16"),
        all_layouts_row({"how": "checkpoint"}, "pp2,zb_h1", "MW-PIPELINE-018", "interleaved_1f1b"),
    ],
)
def test_refused_in_the_first_step(
    options: dict[str, str], layout: str, code: str, value: str, pool: RankPool
) -> None:
    text = layout_config(hard(**options), parse_layout(layout), 4, "float32").model_dump_json()
    with raises(code, value):
        pool.run(run_layout, 2, text, 1, True)


def test_a_schedule_of_ones_own_is_proven(
    tmp_path: Path, pool: RankPool, references: References
) -> None:
    """By the word ``file``; without one in the configuration the word says so."""
    own = tmp_path / "own.txt"
    own.write_text(format_schedule(build("zb_h1", 2, 4)))
    config = hard()
    config = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"schedule_file": str(own)})}
    )
    assert_agrees(config, "pp2,file", pool, references, global_batch=4, steps=2)
    own.write_text(format_schedule(build("zb_h1", 2, 4)).replace("0F2 ", ""))
    with raises("MW-SCHEDULE-014", "own.txt"):
        draw_blueprint(layout_config(config, parse_layout("pp2,file"), 4, "float64"))
    with raises("MW-VERIFY-006"):
        layout_config(hard(), parse_layout("pp2,file"), 4, "float64")


def test_recompute_that_would_recompute_nothing_is_refused() -> None:
    config = layout_config(hard(), parse_layout("pp2,full"), 4, "float64")
    empty = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"recompute_layers": []})}
    )
    with raises("MW-PIPELINE-004", "recompute_layers = []"):
        draw_blueprint(empty)


@pytest.mark.parametrize(
    ("name", "options", "values"),
    [
        ("hooked", {"how": "hook"}, ("1.linear.weight",)),
        ("hooked", {"how": "accumulated"}, ("1.linear.weight",)),
        ("hooked", {"how": "made with it"}, ("1.linear.weight",)),
        ("odd_parameter", {"dtype": "complex64"}, ("1.odd", "complex64")),
        ("odd_parameter", {"dtype": "int64"}, ("1.odd", "int64")),
        ("lazy", {}, (("1.weight", "LazyLinear"))),
    ],
)
def test_parameters_that_would_lose_something(
    name: str, options: dict[str, str], values: tuple[object, ...]
) -> None:
    with raises(("MW-MODEL-012", "MW-MODEL-013", "MW-MODEL-016"), *values):
        draw_blueprint(layout_config(hard(name, **options), parse_layout("pp2"), 4, "float64"))


def test_a_loss_that_counts_ignored_labels(pool: RankPool) -> None:
    text = layout_config(hard("careless_loss"), parse_layout("pp1"), 4, "float32").model_dump_json()
    with raises("MW-PIPELINE-034", "ignore_index=-100"):
        pool.run(run_layout, 1, text, 1, True)
