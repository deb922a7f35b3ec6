"""The sample order: a permutation per epoch, a function of (seed, epoch, index)
and of nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.order import OnceInOrder, SampleOrder, permute, round_keys


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**9))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size, seed)
    assert sorted(order(epoch * size + place) for place in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 4095, 4096, 4097])
def test_sizes_around_powers_of_two(size: int) -> None:
    keys = round_keys(3, 4)
    assert sorted(permute(place, size, keys) for place in range(size)) == list(range(size))


def test_a_corpus_of_any_size_needs_no_table() -> None:
    size = 10**15 + 7
    order = SampleOrder(size, 1)
    numbers = [order(index) for index in range(2_000)]
    assert len(set(numbers)) == 2_000
    assert all(0 <= number < size for number in numbers)
    assert sum(numbers) / 2_000 == pytest.approx(size / 2, rel=0.05)


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(SampleOrder(100, seed)(epoch * 100 + place) for place in range(100))
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_every_place_sees_every_sample_equally_often() -> None:
    """Chi-square of (place, sample) over 4000 seeds: 81 degrees of freedom,
    1e-6 quantile at about 155.
    """
    size, num_seeds = 10, 4_000
    seen = Counter(
        (place, SampleOrder(size, seed)(place))
        for seed in range(num_seeds)
        for place in range(size)
    )
    expected = num_seeds / size
    chi_square = sum(
        (seen[place, number] - expected) ** 2 / expected
        for place in range(size)
        for number in range(size)
    )
    assert chi_square < 155


def test_neighbours_do_not_stay_neighbours() -> None:
    """The step from one sample to the next is +1 about once per epoch, as chance has it."""
    size = 5_000
    numbers = [SampleOrder(size, 0)(index) for index in range(size)]
    assert sum(after == before + 1 for before, after in pairwise(numbers)) < 8


def test_the_order_never_changes_between_versions() -> None:
    """A run resumed with a later version must go on in the order it began with."""
    assert [SampleOrder(1000, 1234)(index) for index in (0, 1, 2, 999, 1000, 123_456)] == GOLDEN


GOLDEN = [50, 521, 609, 480, 802, 609]


def test_once_in_order_ends() -> None:
    order = OnceInOrder(3)
    assert [order(index) for index in range(5)] == [0, 1, 2, None, None]


def test_order_needs_no_torch() -> None:
    code = (
        "import sys, meshwright.data.order; sys.exit('torch' in sys.modules or 'numpy' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
