"""Degrees that a user pins are those of every layout of a search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright_plan.planner.choice import Choice
from meshwright_plan.planner.choices import choices
from meshwright_plan.planner.search import search
from tests.plan.planner.small import cache, hardware


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 1}, {"dp": 4}, {"pp": 2, "tp": 2}], ids=str)
def test_every_layout_has_the_pinned_degrees(pins: dict[str, int]) -> None:
    free = {each for each in choices(cache(), hardware(), 1) if isinstance(each, Choice)}
    pinned = {
        each
        for each in choices(replace(cache(), pins=pins), hardware(), 1)
        if isinstance(each, Choice)
    }
    assert pinned == {
        each for each in free if all(getattr(each, axis) == n for axis, n in pins.items())
    }
    assert pinned and pinned != free


def test_a_search_ranks_the_layouts_with_pinned_degrees() -> None:
    found = search(replace(cache(), pins={"tp": 2}), hardware(), 1)
    assert found.best and {each.choice.tp for each in found.best} == {2}
