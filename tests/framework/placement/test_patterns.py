"""Patterns of names: one language, and one error for a pattern that matches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.placement.patterns import (
    check_patterns,
    entries_for,
    entry_for,
    fits,
    fits_around,
    matching,
    unmatched,
)
from tests.support.errors import raises
from tests.support.placed_modules import Case, config_of, gpt2, llama, own

NAMES = ["block0", "block0.up", "block1", "block1.up", "block10.up", "head"]


def test_the_language() -> None:
    assert matching(["block?.up", "h*"], NAMES) == ["block0.up", "block1.up", "head"]
    assert matching(["block[1-9]*"], NAMES) == ["block1", "block1.up", "block10.up"]
    assert matching(["Head"], NAMES) == [] and not fits("head")
    assert fits_around("block0.mlp.up", "block0") and not fits_around("block0.up", "up")
    entries = {"block0*": "a", "*.up": "b"}
    assert entries_for("block0.up", entries) == ["a", "b"]
    assert entry_for("block1.up", entries) == "b" and entry_for("head", entries) is None


def test_near_names_are_one_for_blocks_that_differ_by_a_number() -> None:
    with raises("MW-PLACEMENT-001", "a.key", "'blok*.up'", "near names: block0.up, block0"):
        check_patterns("a.key", ["head", "blok*.up"], NAMES, "module")
    (error,) = unmatched("a.key", ["zzz"], NAMES, "module")
    assert error.message.endswith("they are block0, block0.up, head, ...")


KEYS: dict[str, tuple[Case, str]] = {
    "adapter.targets": (gpt2("", adapter={"rank": 2, "targets": ["block*.typo"]}), "Linear"),
    "pipeline.recompute_layers": (
        gpt2("full", pipeline={"recompute_layers": ["block0", "typo*"]}),
        "block0",
    ),
    "pipeline.offload_activations": (
        gpt2("", pipeline={"offload_activations": ["block*.typo"]}),
        "block0",
    ),
    "model.parameter_groups": (
        gpt2("", model={"parameter_groups": [{"names": ["*.typo"], "frozen": True}]}),
        "parameter",
    ),
    "train.fp8_keep": (llama("", train={"linear": "fp8", "fp8_keep": ["typo"]}), "linear"),
    "sharding_plan": (own("", "mistyped"), "scaled"),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_pattern_that_matches_nothing_is_refused_before_a_rank_starts(key: str) -> None:
    case, near = KEYS[key]
    with raises("MW-PLACEMENT-001", key, "typo", near):
        draw_blueprint(config_of(case))


def test_the_second_pattern_is_refused_too() -> None:
    groups: list[Mapping[str, Any]] = [{"names": ["head.*", "hed.*"], "frozen": True}]
    with raises("MW-PLACEMENT-001", "'hed.*'", "head.weight"):
        draw_blueprint(config_of(llama("", model={"parameter_groups": groups})))
