"""Cutting layers into stages, against trying every cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.pipeline.partition import partition, partition_explicit
from tests.support.errors import raises


def every_cut(num_layers: int, num_stages: int) -> list[list[range]]:
    """Return all ways to cut a row of layers into non-empty runs."""
    return [
        [range(start, stop) for start, stop in pairwise((0, *ends, num_layers))]
        for ends in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]


def dearest(costs: Sequence[float], stages: Sequence[range]) -> Fraction:
    """Exact: sums of floats depend on their order."""
    return max(sum((Fraction(costs[layer]) for layer in stage), Fraction()) for stage in stages)


def by_trying_every_cut(costs: Sequence[float], num_stages: int) -> list[range]:
    """Return the rule of the docstring, word for word: the last stage takes most layers,
    the rest is cut by the same rule.
    """
    if num_stages == 1:
        return [range(len(costs))]
    cuts = every_cut(len(costs), num_stages)
    least = min(dearest(costs, cut) for cut in cuts)
    last = min(cut[-1].start for cut in cuts if dearest(costs, cut) == least)
    return [*by_trying_every_cut(costs[:last], num_stages - 1), range(last, len(costs))]


def by_a_table(costs: Sequence[int], num_stages: int) -> int:
    """Return the least dearest stage by the textbook's dynamic programme:
    best[n] of k stages out of those of k - 1.
    """
    total = [0, *itertools.accumulate(costs)]
    best = [0] + [sum(costs) + 1] * len(costs)
    for stage in range(1, num_stages + 1):
        best = [sum(costs) + 1] * stage + [
            min(max(best[m], total[n] - total[m]) for m in range(stage - 1, n))
            for n in range(stage, len(costs) + 1)
        ]
    return best[-1]


WHOLE = st.integers(0, 20).map(float)
ANY = st.floats(0, 1e12, allow_subnormal=True)
FEW = st.sampled_from([0.0, 0.1, 0.1 + 2**-50, 0.3])


@st.composite
def tasks(draw: st.DrawFn) -> tuple[list[float], int]:
    costs = draw(st.one_of(st.lists(cost, min_size=1, max_size=9) for cost in (WHOLE, ANY, FEW)))
    return costs, draw(st.integers(1, len(costs)))


@settings(deadline=None)
@given(tasks())
def test_it_is_the_cut_of_the_rule_that_trying_all_finds(task: tuple[list[float], int]) -> None:
    costs, num_stages = task
    stages = partition(costs, num_stages)
    assert len(stages) == num_stages and all(len(stage) > 0 for stage in stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert dearest(costs, stages) == min(
        dearest(costs, cut) for cut in every_cut(len(costs), num_stages)
    )
    assert stages == by_trying_every_cut(costs, num_stages)


@settings(deadline=None)
@given(tasks(), st.sampled_from([0.5, 2.0**-40, 2.0**20]))
def test_the_cut_does_not_depend_on_the_unit_of_cost(
    task: tuple[list[float], int], factor: float
) -> None:
    costs, num_stages = task
    scaled = [cost * factor for cost in costs]
    if [cost / factor for cost in scaled] == costs:  # nothing was lost to a subnormal
        assert partition(scaled, num_stages) == partition(tuple(costs), num_stages)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 1000), min_size=40, max_size=60), st.integers(1, 40))
def test_more_layers_against_the_textbook_s_table(costs: list[int], num_stages: int) -> None:
    assert dearest(costs, partition(costs, num_stages)) == by_a_table(costs, num_stages)


def test_a_thousand_layers_over_128_stages() -> None:
    """What a table of stages x layers x layers would take minutes for."""
    costs = [0.01, *[0.1 + (layer % 7) / 70 for layer in range(998)], 0.35]
    stages = partition(costs, 128)
    assert len(stages) == 128 and stages[-1].stop == 1000
    assert dearest(costs, stages) < Fraction(sum(costs) / 128) + Fraction(max(costs))


def test_equal_layers_make_equal_stages_whatever_they_cost() -> None:
    """As sums of floats, 0.1 three times is one thing from the left and another from the right."""
    for cost in (0.1, 1 / 3, 1e-9, 12345.678):
        assert [len(stage) for stage in partition([cost] * 60, 20)] == [3] * 20


def test_what_is_left_over_weighs_on_late_stages() -> None:
    assert [len(stage) for stage in partition([1.0] * 9, 4)] == [2, 2, 2, 3]
    assert [len(stage) for stage in partition([0.0] * 9, 4)] == [1, 1, 1, 6]


def test_the_head_counts_by_what_it_costs() -> None:
    """A head as dear as three blocks takes the place of three, not of one,
    and the embedding of none.
    """
    assert partition([0.0, 1, 1, 1, 1, 1, 1, 3], 3) == [range(0, 4), range(4, 7), range(7, 8)]


@pytest.mark.parametrize("num_stages", [1, 5])
def test_one_stage_and_a_stage_for_each_layer(num_stages: int) -> None:
    stages = partition([1.0] * 5, num_stages)
    assert [len(stage) for stage in stages] == [5 // num_stages] * num_stages


def test_fewer_layers_than_stages() -> None:
    with raises("MW-PIPELINE-002", "3 layers", "4 stages", "parallel.pp <= 3"):
        partition([1.0, 1.0, 1.0], 4)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "interleave", "values"),
    [
        (7, 8, 2, (("7 layers", "8 stages", "pp 4 x interleave 2", "parallel.pp <= 3"))),
        (3, 8, 2, ("parallel.pp <= 1 [MW-PIPELINE-002]",)),
        (3, 8, 4, ("1f1b [MW-PIPELINE-002]",)),
        (1, 8, 4, ("more layers [MW-PIPELINE-002]",)),
    ],
)
def test_fewer_layers_than_interleaved_stages(
    num_layers: int, num_stages: int, interleave: int, values: tuple[object, ...]
) -> None:
    with raises("MW-PIPELINE-002", *values):
        partition([1.0] * num_layers, num_stages, interleave)


def test_the_user_s_own_cut() -> None:
    assert partition_explicit([1, 3, 2], 6) == [range(0, 1), range(1, 4), range(4, 6)]


def test_a_cut_of_another_model() -> None:
    with raises("MW-PIPELINE-003", "[2, 3]", "2 + 3 = 5", "6 layers"):
        partition_explicit([2, 3], 6)
