"""A second run of a layout: what it says with a stop and a resume in the middle,
and without one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.verify import compare
from meshwright.verify.distance import is_beyond, relative
from meshwright.verify.reference import RunNumbers
from meshwright.verify.tolerance import TOLERANCES


def numbers(steps: int, **changed: Any) -> RunNumbers:
    passes = steps + (1 if steps == 1 else 2)
    every: dict[str, Any] = {
        name: {"w": torch.ones(2)} for name in ("initial", "gradients", "weights", "stepped")
    }
    every |= {
        "losses": [2.0] * steps,
        "grad_norms": [1.0] * steps,
        "rates": [0.1] * steps,
        "scales": [1.0] * steps,
    }
    every |= {"tokens": [{0: 1}] * passes, "masters": {}, "validation": [3.0] * (passes - steps)}
    return RunNumbers(**(every | {"metrics": [{}] * passes} | changed))


ORDER = "the order of sums: two runs differ"


@pytest.mark.parametrize(
    ("steps", "resumed_after", "loss_of", "said", "points_to"),
    [
        (1, 0, 1, "has another loss from step 1 on", ORDER),
        (4, 0, 4, "has another loss from step 4 on", ORDER),
        (4, 2, 1, "resumed after step 2", ORDER),
        (4, 2, 3, "resumed after step 2", "the resume, or the order of sums"),
    ],
)
def test_a_resume_is_named_only_if_there_was_one(
    steps: int, resumed_after: int, loss_of: int, said: str, points_to: str
) -> None:
    first, losses = numbers(steps), [2.0] * steps
    losses[loss_of - 1] += 1e-15
    again = numbers(steps, losses=losses, resumed_after=resumed_after)
    row = compare("dp2", first, again, first, TOLERANCES["float64"])
    (problem,) = row.problems
    assert said in problem and row.suspect.startswith(points_to) and row.repeats is False


@pytest.mark.parametrize(
    "pair", [(1.0, float("inf")), (float("inf"), 1.0), (float("nan"), 1.0), (float("nan"),) * 2]
)
def test_no_number_is_near_infinity_or_nan(pair: tuple[float, float]) -> None:
    assert relative(*pair) == float("inf") and is_beyond(*pair, 1e9)


def test_rates_of_a_layout_are_compared_in_every_step() -> None:
    found = numbers(2, rates=[0.1])
    with pytest.raises(ValueError, match="zip"):
        compare("dp2", found, None, numbers(2), TOLERANCES["float64"])
