"""Parameter groups by name: what they match, what they refuse,
and that the optimizer sees them in every layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import ParameterGroup, RunConfig
from meshwright.errors import ModelError
from meshwright.model.build import configured_model
from meshwright.model.groups import assign_groups
from meshwright.verify import parse_layout, verify
from meshwright_launch.pool import RankPool
from tests.launch.test_python import made
from tests.support.errors import has_code, raises

SHAPES = {"0.weight": (8, 4), "1.up.weight": (4, 4), "1.up.bias": (4,), "2.weight": (8, 4)}
HERE = "tests.framework.model.test_groups"


def layer_wise(name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
    depth = int(name.partition(".")[0])
    return None if len(shape) < 2 else {"learning_rate_factor": 0.5**depth}


def misspelt(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"lr": 0.1}


def test_the_first_match_counts() -> None:
    first, second = (
        ParameterGroup(names=["*.bias", "0.*"], weight_decay=0.5),
        ParameterGroup(names=["*"], frozen=True),
    )
    found = assign_groups(SHAPES, [first, second])
    assert found == {
        "0.weight": first,
        "1.up.weight": second,
        "1.up.bias": first,
        "2.weight": second,
    }


def test_a_function_gives_each_parameter_its_group() -> None:
    found = assign_groups(SHAPES, f"{HERE}:layer_wise")
    assert {name: group.learning_rate_factor for name, group in found.items()} == {
        "0.weight": 1.0,
        "1.up.weight": 0.5,
        "2.weight": 0.25,
    }


def test_a_pattern_without_a_match_is_refused_with_near_names() -> None:
    with raises("MW-PLACEMENT-001", "model.parameter_groups", "'1.up.wieght'", "1.up.weight"):
        assign_groups(SHAPES, [ParameterGroup(names=["1.up.wieght"])])


@pytest.mark.parametrize(
    ("name", "text"), [("misspelt", "lr: Extra inputs"), ("SHAPES", "no function SHAPES")]
)
def test_a_function_that_returns_something_else_is_refused(name: str, text: str) -> None:
    with pytest.raises(ModelError, check=has_code("MW-CONFIG-010", "MW-MODEL-028")) as caught:
        assign_groups(SHAPES, f"{HERE}:{name}")
    assert text in caught.value.message


def test_a_model_without_anything_to_train_is_refused() -> None:
    config = grouped([{"names": ["*"], "frozen": True}])
    with raises("MW-MODEL-029"):
        configured_model(config)


def grouped(groups: Any) -> RunConfig:
    return made(Path("unused"), model={"parameter_groups": groups})


@pytest.mark.long
@pytest.mark.slow
def test_layouts_agree_with_groups_and_frozen_parameters(pool: RankPool) -> None:
    groups = [
        {"names": ["embedding.*"], "learning_rate_factor": 0.1, "weight_decay": 0.3},
        {"names": ["block0.*.weight"], "frozen": True},
        {"names": ["*.bias"], "weight_decay": 0.2, "learning_rate_factor": 3.0},
    ]
    layouts = [
        parse_layout(text)
        for text in ("dp2,pp2,tp2,zero2,zb_v", "dp2,tp2,zero3", "dp4,zero1,offload")
    ]
    report = verify(grouped(groups), layouts, pool, global_batch=8, steps=2)
    assert report.passed, report.table()


def test_an_alias_of_a_tied_weight_is_named_with_its_first_name() -> None:
    groups = [ParameterGroup(names=["head.*"], weight_decay=0.0)]
    with raises("MW-MODEL-055", "head.weight alone, which is tied to embedding.weight"):
        assign_groups(
            {"embedding.weight": (3, 2)}, groups, aliases={"head.weight": "embedding.weight"}
        )
