"""The learning rate of each schedule: that of its definition, and what comes after the decay."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.config import Optimizer
from meshwright.optimizer.learning_rate import learning_rate

PEAK, LOW = 8e-3, 2e-3


def rates(num_steps: int, **fields: object) -> list[float]:
    """Of every step of a run."""
    optimizer = Optimizer.model_validate(
        {"learning_rate": PEAK, "min_learning_rate": LOW, **fields}
    )
    return [learning_rate(optimizer, step, num_steps) for step in range(num_steps)]


def documented(schedule: str, step: int, num_steps: int, warmup: int, decay: int) -> float:
    """Return the rate of the step-th step, counted from 1.

    Linear warmup to the peak, which its last step has; then down to the minimum, which the last
    step of the run has, along half a cosine or a line; wsd: over the last ``decay`` steps.
    """
    if step <= warmup:
        return PEAK * step / warmup
    falling = decay if schedule == "wsd" else num_steps - warmup
    passed = step - (num_steps - falling)
    if schedule == "constant" or passed <= 0:
        return PEAK
    done = passed / falling
    if schedule == "cosine":
        return LOW + (PEAK - LOW) * (math.cos(math.pi * done) + 1) / 2
    return PEAK - (PEAK - LOW) * done


@settings(deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    num_steps=st.integers(1, 60),
    warmup=st.integers(0, 70),
    decay=st.integers(0, 20),
)
@example("cosine", 12, 4, 0)
@example("linear", 1, 0, 0)
@example("wsd", 12, 4, 3)
@example("wsd", 6, 2, 0)
@example("constant", 3, 3, 0)
def test_every_step_has_the_documented_rate(
    schedule: str, num_steps: int, warmup: int, decay: int
) -> None:
    decay = min(decay, max(0, num_steps - warmup))
    found = rates(num_steps, schedule=schedule, warmup_steps=warmup, decay_steps=decay)
    steps = range(1, num_steps + 1)
    expected = [documented(schedule, step, num_steps, warmup, decay) for step in steps]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_decay_that_ends_before_or_after_the_last_step(schedule: str) -> None:
    """The rates are those of a run that is as long as the decay; after it, the minimum."""
    keys = {"schedule": schedule, "warmup_steps": 3, "decay_steps": 4}
    assert rates(15, **keys, decay_until=10) == [*rates(10, **keys), *[LOW] * 5]
    assert rates(6, **keys, decay_until=10) == rates(10, **keys)[:6]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_beyond_the_end_it_stays_at_the_minimum(schedule: str) -> None:
    optimizer = Optimizer.model_validate(
        {"learning_rate": PEAK, "min_learning_rate": LOW, "schedule": schedule, "decay_steps": 3}
    )
    assert learning_rate(optimizer, 40, 12) == pytest.approx(LOW, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_without_a_minimum_the_last_step_still_trains(schedule: str) -> None:
    """By default a tenth of the peak: at zero the last step would be computed
    and change no weight.
    """
    optimizer = Optimizer.model_validate(
        {"learning_rate": PEAK, "schedule": schedule, "decay_steps": 4}
    )
    assert learning_rate(optimizer, 11, 12) == pytest.approx(PEAK / 10, rel=1e-12)
    zero = optimizer.model_copy(update={"min_learning_rate": 0.0})
    assert learning_rate(zero, 11, 12) == pytest.approx(0.0, abs=1e-18)
