"""The step that is traced, and clocks of several hosts put together."""

from __future__ import annotations

import pytest

from meshwright.watch.trace import RankSpans, clock_offsets, traced_step


@pytest.mark.parametrize(
    ("trace_step", "taken", "steps", "traced"),
    [
        (5, 0, 100, 5),
        (5, 0, 3, 3),
        (5, 40, 100, 45),
        (5, 98, 100, 100),
        (1, 0, 9, 1),
        (0, 0, 100, None),
    ],
)
def test_the_step_that_is_traced(
    trace_step: int, taken: int, steps: int, traced: int | None
) -> None:
    assert traced_step(trace_step, taken, steps) == traced


def seen(host: str, *ticks: float) -> RankSpans:
    return RankSpans(host, ticks, 0.0, (), ())


def test_clocks_of_one_host_are_one() -> None:
    assert clock_offsets([seen("a", 1.0), seen("a", 1.5)]) == ([0.0, 0.0], 0.0)


def test_clocks_of_other_hosts_are_put_together_at_barriers() -> None:
    """b is 100 s ahead, and one of its ranks left one barrier late."""
    offsets, error_s = clock_offsets(
        [
            seen("a", 1, 2, 3),
            seen("a", 1, 2, 3.25),
            seen("b", 101, 102, 103.5),
            seen("b", 101, 102, 103),
        ]
    )
    assert offsets == [0, 0, 100, 100] and error_s == 0.5
