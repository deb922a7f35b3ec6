"""Cutting layers into stages, against trying every cut."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError
from framework.pipeline.partition import partition, partition_explicit


def every_cut(num_layers: int, num_stages: int) -> list[list[range]]:
    """All ways to cut a row of layers into non-empty runs."""
    return [
        [range(start, stop) for start, stop in pairwise((0, *ends, num_layers))]
        for ends in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]


def dearest(costs: list[float], stages: list[range]) -> float:
    return max(sum(costs[layer] for layer in stage) for stage in stages)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[list[float], int]:
    costs = draw(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=10))
    return costs, draw(st.integers(1, len(costs)))


@settings(deadline=None)
@given(tasks())
def test_no_other_cut_has_a_cheaper_dearest_stage(task: tuple[list[float], int]) -> None:
    costs, num_stages = task
    stages = partition(costs, num_stages)
    assert len(stages) == num_stages and all(len(stage) > 0 for stage in stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert dearest(costs, stages) == min(dearest(costs, cut) for cut in every_cut(len(costs), num_stages))


@settings(deadline=None)
@given(tasks())
def test_every_rank_finds_the_same_cut(task: tuple[list[float], int]) -> None:
    costs, num_stages = task
    assert partition(costs, num_stages) == partition(tuple(costs), num_stages)


def test_the_head_counts_by_what_it_costs() -> None:
    """A head as dear as three blocks takes the place of three, not of one, and the embedding of none."""
    assert partition([0.0, 1, 1, 1, 1, 1, 1, 3], 3) == [range(0, 4), range(4, 7), range(7, 8)]


@pytest.mark.parametrize("num_stages", [1, 5])
def test_one_stage_and_a_stage_for_each_layer(num_stages: int) -> None:
    stages = partition([1.0] * 5, num_stages)
    assert [len(stage) for stage in stages] == [5 // num_stages] * num_stages


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ConfigError, match=r"3 layers over 4 stages: each stage needs .* Use parallel.pp <= 3"):
        partition([1.0, 1.0, 1.0], 4)


def test_the_user_s_own_cut() -> None:
    assert partition_explicit([1, 3, 2], 6) == [range(0, 1), range(1, 4), range(4, 6)]


def test_a_cut_of_another_model() -> None:
    with pytest.raises(ConfigError) as raised:
        partition_explicit([2, 3], 6)
    assert "pipeline.balance = [2, 3]: 2 + 3 = 5, but the model has 6 layers" in str(raised.value)
    assert "embedding and head are layers too" in str(raised.value)
