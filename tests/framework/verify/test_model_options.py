"""Options of our models in any layout: the numbers of one process, in which plain torch trains the builder's module."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.verify import parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, model_config, prove, size_for

LAYOUTS = ["dp2,pp2,tp2,sequence", "dp2,tp2,zero3", "pp4,interleaved_1f1b", "dp4,zero2,mbs2"]


@pytest.fixture(scope="module")
def references() -> References:
    """Shared by the tests of this module."""
    return References()


def check(text: str, model: str, options: dict[str, Any], pool: RankPool, references: References) -> None:
    layout = parse_layout(text)
    size = size_for(layout)
    config = model_config(model, size, **options)
    row = prove(config, layout, pool, references, global_batch=size.global_batch, steps=3, twice=False)
    assert row.passed, "\n".join(row.problems)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt2", {"init_std": 0.1, "residual_init": "layer_index"}),
        ("llama", {"init_std": 0.05, "residual_init": "none"}),
    ],
)
def test_initial_weights(
    layout: str, model: str, options: dict[str, Any], pool: RankPool, references: References
) -> None:
    check(layout, model, options, pool, references)


LOSSES = [
    ("gpt2", {"label_smoothing": 0.1}),
    ("llama", {"z_loss": 0.01}),
    ("t5", {"label_smoothing": 0.2, "z_loss": 1e-3}),
]


@pytest.mark.parametrize("layout", ["dp2,pp2,tp2", "dp2,tp4,sequence,zero3", "pp4,zb_h1", "dp4,zero2"])
@pytest.mark.parametrize(("model", "options"), LOSSES)
def test_losses(layout: str, model: str, options: dict[str, Any], pool: RankPool, references: References) -> None:
    """The vocabulary of 61 is padded where tp splits it. Validation has neither option in layouts and reference."""
    check(layout, model, options, pool, references)
