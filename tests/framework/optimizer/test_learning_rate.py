"""The learning rate at the corners of each schedule: first step, end of warmup, the step after, the last."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config import Optimizer
from meshwright.optimizer.learning_rate import learning_rate

PEAK, LOW = 8e-3, 2e-3


def rates(num_steps: int, **fields: object) -> list[float]:
    """Of every step of a run."""
    optimizer = Optimizer.model_validate({"learning_rate": PEAK, "min_learning_rate": LOW, **fields})
    return [learning_rate(optimizer, step, num_steps) for step in range(num_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warmup_begins_above_zero_and_ends_at_the_peak(schedule: str) -> None:
    found = rates(12, schedule=schedule, warmup_steps=4, decay_steps=3)
    assert found[:4] == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK], rel=1e-15)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_the_last_step_is_at_the_minimum(schedule: str, warmup_steps: int) -> None:
    found = rates(12, schedule=schedule, warmup_steps=warmup_steps, decay_steps=3)
    assert found[-1] == pytest.approx(LOW, rel=1e-12)
    assert found[-2] > LOW * 1.001


def test_cosine() -> None:
    """Eight steps after warmup: the first is an eighth of the way, the fourth in the middle."""
    found = rates(12, schedule="cosine", warmup_steps=4)
    assert found[4] == pytest.approx(LOW + (PEAK - LOW) * (1 + math.cos(math.pi / 8)) / 2, rel=1e-15)
    assert found[7] == pytest.approx((PEAK + LOW) / 2, rel=1e-12)


def test_linear() -> None:
    found = rates(12, schedule="linear", warmup_steps=4)
    assert found[4:] == pytest.approx([PEAK - (PEAK - LOW) * i / 8 for i in range(1, 9)], rel=1e-12)


def test_warmup_stable_decay() -> None:
    found = rates(12, schedule="wsd", warmup_steps=4, decay_steps=3)
    assert found[4:9] == [PEAK] * 5
    assert found[9:] == pytest.approx([PEAK - (PEAK - LOW) * i / 3 for i in range(1, 4)], rel=1e-12)


def test_without_decay_steps_nothing_falls() -> None:
    assert rates(6, schedule="wsd", warmup_steps=2)[1:] == [PEAK] * 5


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_decay_that_ends_before_or_after_the_last_step(schedule: str) -> None:
    """The rates are those of a run that is as long as the decay; after it, the minimum."""
    keys = {"schedule": schedule, "warmup_steps": 3, "decay_steps": 4}
    assert rates(15, **keys, decay_until=10) == [*rates(10, **keys), *[LOW] * 5]
    assert rates(6, **keys, decay_until=10) == rates(10, **keys)[:6]


def test_constant() -> None:
    assert rates(5, schedule="constant") == [PEAK] * 5


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_run_that_is_all_warmup(schedule: str) -> None:
    assert rates(3, schedule=schedule, warmup_steps=3) == pytest.approx([PEAK / 3, PEAK * 2 / 3, PEAK], rel=1e-15)
    assert rates(2, schedule=schedule, warmup_steps=4) == pytest.approx([PEAK / 4, PEAK / 2], rel=1e-15)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_run_of_one_step(schedule: str) -> None:
    assert rates(1, schedule=schedule, decay_steps=1) == pytest.approx([LOW], rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_beyond_the_end_it_stays_at_the_minimum(schedule: str) -> None:
    optimizer = Optimizer.model_validate(
        {"learning_rate": PEAK, "min_learning_rate": LOW, "schedule": schedule, "decay_steps": 3}
    )
    assert learning_rate(optimizer, 40, 12) == pytest.approx(LOW, rel=1e-12)


@settings(deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    num_steps=st.integers(1, 60),
    warmup_steps=st.integers(0, 20),
    decay_steps=st.integers(0, 20),
)
def test_it_rises_in_warmup_and_never_after(schedule: str, num_steps: int, warmup_steps: int, decay_steps: int) -> None:
    """Between 0 and the peak, never below the minimum once warm, without a jump upwards after warmup."""
    warmup_steps = min(warmup_steps, num_steps)
    decay_steps = min(decay_steps, num_steps - warmup_steps)
    found = rates(num_steps, schedule=schedule, warmup_steps=warmup_steps, decay_steps=decay_steps)
    assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in found)
    assert found[:warmup_steps] == sorted(found[:warmup_steps])
    after = found[max(0, warmup_steps - 1) :]
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(after))
    assert all(rate >= LOW * (1 - 1e-12) for rate in found[warmup_steps:])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_without_a_minimum_the_last_step_still_trains(schedule: str) -> None:
    """By default a tenth of the peak: at zero the last step would be computed and change no weight."""
    optimizer = Optimizer.model_validate({"learning_rate": PEAK, "schedule": schedule, "decay_steps": 4})
    assert learning_rate(optimizer, 11, 12) == pytest.approx(PEAK / 10, rel=1e-12)
    zero = optimizer.model_copy(update={"min_learning_rate": 0.0})
    assert learning_rate(zero, 11, 12) == pytest.approx(0.0, abs=1e-18)
