"""Fields of a layout that a user holds are those of every layout of a search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright_plan.planner.choice import Choice, Pins
from meshwright_plan.planner.choices import choices
from meshwright_plan.planner.nearest import _Request
from meshwright_plan.planner.search import search
from tests.plan.planner.small import cache, hardware


def offered(pins: Pins) -> set[Choice]:
    """Return the layouts of a search with these pins."""
    every = choices(replace(cache(), pins=pins), hardware(), 1, offload=pins.get("offload") is True)
    return {each for each in every if isinstance(each, Choice)}


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2},
        {"pp": 1},
        {"dp": 4},
        {"pp": 2, "tp": 2},
        {"recompute": "full"},
        {"micro_batch_size": 2},
        {"chunks": 2},
        {"schedule": "zb_v"},
    ],
    ids=str,
)
def test_every_layout_has_the_pinned_values(pins: Pins) -> None:
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


@pytest.mark.parametrize(
    "pins",
    [
        {"sequence": False, "tp": 2},
        {"schedule": "gpipe"},
        {"schedule": "interleaved_1f1b", "interleave": 2},
        {"unit_layers": 2, "zero": 3},
        {"offload": True},
    ],
    ids=str,
)
def test_values_that_the_search_does_not_try_by_itself(pins: Pins) -> None:
    held = offered(pins)
    assert held and all(
        getattr(each, name) == value for each in held for name, value in pins.items()
    )
    assert not held & offered({}) or "interleave" in pins


def test_a_held_stage_with_a_held_interleave_is_tried() -> None:
    """The search leaves ZeRO-3 with many stages per rank out by itself: it gathers too often."""
    bench = cache(samples=16, num_layers=8)
    with_schedule: Pins = {"zero": 3, "schedule": "interleaved_1f1b", "interleave": 3}
    with_interleave: Pins = {"zero": 3, "interleave": 4}
    for pins in (with_schedule, with_interleave):
        held = choices(replace(bench, pins=pins), hardware(), 1)
        assert any(
            each.chunks > 1 and each.num_replicas > 1 for each in held if isinstance(each, Choice)
        ), pins
    free = [each for each in choices(bench, hardware(), 1) if isinstance(each, Choice)]
    assert not [each for each in free if each.zero == 3 and each.interleave > 2 < each.chunks]


@pytest.mark.parametrize(
    "pins", [{"micro_batch_size": 64}, {"chunks": 7}, {"tp": 2, "dp": 512}, {"pp": 3}], ids=str
)
def test_sizes_of_a_replica_are_those_of_the_held_degrees(pins: Pins) -> None:
    """A batch that is held does not empty them; a degree is in all of them."""
    of_one_node = _Request(replace(cache(), pins=pins), hardware(), 1).replica_sizes()
    assert of_one_node
    assert all(size % int(pins.get("tp", pins.get("pp", 1))) == 0 for size in of_one_node)


def test_replicas_alone_have_a_pinned_stage() -> None:
    held = offered({"zero": 0})
    assert {each.zero for each in held} == {0}
    assert {each.num_replicas for each in held} == {each.num_replicas for each in offered({})}
    assert {each.num_replicas for each in offered({"zero": 3})} >= {1, 4}


def test_a_search_ranks_the_layouts_with_pinned_degrees() -> None:
    found = search(replace(cache(), pins={"tp": 2}), hardware(), 1)
    assert found.best and {each.choice.tp for each in found.best} == {2}
