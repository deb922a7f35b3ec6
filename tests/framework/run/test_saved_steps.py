"""Steps that are saved: the same for the training loop and for the check of a user's optimizer."""

from __future__ import annotations

import pytest

from meshwright.parts import ENOUGH, FILES_LOST, FLAGS, NOT_WRITTEN, SAVE_DUE, STOP, is_saved


@pytest.mark.parametrize(
    ("every", "step", "flags", "expected"),
    [
        (4, 3, set(), False),
        (4, 8, set(), True),
        (0, 8, set(), False),
        (0, 10, set(), True),
        (4, 3, {NOT_WRITTEN}, False),
        *[(4, 3, {flag}, True) for flag in (STOP, ENOUGH, SAVE_DUE, FILES_LOST)],
        (0, 3, set(FLAGS), True),
    ],
)
def test_a_step_is_saved(every: int, step: int, flags: set[str], expected: bool) -> None:
    """A failed write of an earlier checkpoint alone makes no step due."""
    assert is_saved(step, flags, every=every, last=10) == expected
