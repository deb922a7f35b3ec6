"""Models whose builder sets the first values, beside what else changes weights:
in float64 against plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.config import RunConfig
from meshwright.model.build import build_model, configured_model
from meshwright.verify import parse_layout
from meshwright.verify.run import verify
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of

OWN = "tests.support.own_values:build"
ADAPTER = {"rank": 2, "alpha": 8.0, "targets": ["h*.c_fc", "h*.c_proj"]}


def own(how: str, **sections: Any) -> RunConfig:
    return config_of(OWN, {"how": how}, 6, **sections)


@pytest.mark.parametrize("how", ["nanogpt", "rest of own"])
@pytest.mark.parametrize("layout", ["tp2", "dp2,zero3"])
def test_adapters_on_the_builder_s_base(
    how: str, layout: str, pool: RankPool, references: References
) -> None:
    config = own(how, adapter=ADAPTER)
    adapted, plain = configured_model(config), build_model(OWN, {"how": how}, config.run.seed)
    assert torch.equal(adapted.initial("h0.c_fc.weight"), plain.initial("h0.c_fc.weight"))
    assert_agrees(config, layout, pool, references, global_batch=4, steps=3)


@pytest.mark.parametrize("layout", ["dp2,ep2", "dp2,ep2,zero3"])
def test_experts_of_the_builder(layout: str, pool: RankPool, references: References) -> None:
    assert_agrees(own("experts"), layout, pool, references, global_batch=4, steps=3)


@pytest.mark.parametrize("how", ["truncated", "rest", "halved", "cloned"])
def test_values_in_parts(how: str, pool: RankPool, references: References) -> None:
    assert_agrees(own(how), "pp2", pool, references, global_batch=4, steps=3)


def test_resumed_on_another_layout(pool: RankPool) -> None:
    """A checkpoint after a step of one layout goes on as another;
    the builder's random mask is in none of them.
    """
    layouts = [parse_layout(words) for words in ("dp2,zero3", "pp2")]
    report = verify(own("masked"), layouts, pool, global_batch=4, steps=3, random_tokens=True)
    assert report.passed, "\n".join(problem for row in report.rows for problem in row.problems)
