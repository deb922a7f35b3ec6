"""Dropout by functions in a user's own layers: the numbers of one plain process in every layout."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.build import build
from meshwright.config import RunConfig
from meshwright.config.combinations.layout import parse_layout
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parts import StepFeed
from meshwright.traits import traits_of
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of
from tests.support.errors import raises

MODEL = "tests.framework.verify.functional_model:"
LAYOUTS = (
    "dp2,pp2,zero1",
    "tp2",
    "tp2,sequence,full",
    "cp2",
    "cp2,tp2,heads",
    "pp2,zb_h1,pointwise",
    "dp2,zero3,selective",
    "dp2,mbs2,full",
)


def config(builder: str = "build", **options: Any) -> RunConfig:
    return config_of(f"{MODEL}{builder}", options, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_numbers_of_one_process(
    layout: str, pool: RankPool, references: References
) -> None:
    assert_agrees(config(), layout, pool, references, global_batch=4, steps=2)


@pytest.mark.parametrize("layout", ["pp2", "dp2,mbs2,full", "pp2,zb_h1"])
def test_attention_of_torch_and_dropouts_of_channels(
    layout: str, pool: RankPool, references: References
) -> None:
    assert_agrees(config("build_of_torch"), layout, pool, references, global_batch=4, steps=2)


def gradients_of(layout: str, model: RunConfig, **train: Any) -> None:
    """Take a step of one rank."""
    config = layout_config(model, parse_layout(layout), 2, "float32").replace(train=train)
    parts = build(config, open_mesh(Grid(), "cpu"), (open_verify_source(config, True), {}))
    for replica in parts.replicas.values():
        replica.begin_step()
    parts.executor.run(StepFeed(parts, parts.source, 0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layers_own_recompute_is_refused(reentrant: bool) -> None:
    with raises("MW-MODEL-061", "pipeline.recompute"):
        gradients_of("pp1", config("build_checkpointed", reentrant=reentrant))


def test_a_part_that_no_shape_tells_is_refused_before_any_rank_starts() -> None:
    """Of (B, S H, d) tp = 2 leaves half, which is no interval."""
    with raises(
        "MW-MODEL-060", "layer 1: call 1", "(B, 16, 4) on a rank", "drops elements of (B, 32, 4)"
    ):
        draw_blueprint(layout_config(config("build_merged"), parse_layout("tp2"), 2, "float32"))


def test_compiled_layers_leave_them_out() -> None:
    """A layer that draws by functions runs as it is, also in a second forward."""
    with pytest.warns(UserWarning, match="3 layers with functional dropouts"):
        gradients_of("mbs2,full", config(), compile=True)


def test_functional_dropout_is_a_trait() -> None:
    assert traits_of(config()).has_dropout and traits_of(config("build_of_torch")).has_dropout
