"""When a run that failed is started again, and when it is given up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from meshwright.errors import CommunicationError, DataError, NonFiniteError, Preempted
from meshwright_launch.failure import RankFailed, build_error, describe, write_failure
from meshwright_launch.failure import read_failures as notes
from meshwright_launch.restarts import (
    GIVEN_UP_EXIT_CODE,
    find_stop_reason,
    is_transient,
    run_with_restarts,
)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ArithmeticError("a cosmic ray"), True),
        (SystemExit(2), True),
        (CommunicationError("MW-TEST-001", "rank 0: barrier failed"), True),
        (DataError("MW-TEST-001", "corpus.idx: damaged"), False),
        (NonFiniteError("MW-TEST-001", "the loss is NaN"), False),
        (Preempted("MW-TEST-001", "stopped by SIGTERM"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_may_pass(error: BaseException, again: bool, tmp_path: Path) -> None:
    """As it comes from a rank, over its note."""
    write_failure(describe(error, 1), tmp_path)
    failure = build_error(1, 1, notes(tmp_path), tmp_path)
    assert is_transient(failure) == again
    failure.is_requested = True
    assert not is_transient(failure)


def test_a_rank_that_was_killed_may_pass(tmp_path: Path) -> None:
    assert is_transient(build_error(1, -9, [], tmp_path))
    assert is_transient(build_error(1, 3, [], tmp_path))


@pytest.mark.parametrize(
    ("reached", "most", "said"),
    [
        ([0, 0], 1, None),
        ([0, 0], 0, "max_restarts = 0 is used up"),
        ([0, 10, 20], 1, "max_restarts = 1 is used up, at step 20"),
        ([0, 0, 0, 0], 5, None),  # the first start was no restart
        ([0, 0, 0, 0, 0], 5, "3 restarts in a row never got past step 0"),
        ([160, 160, 160, 160, 160], 5, "3 restarts in a row never got past step 160"),
        ([0, 10, 10, 10], 5, None),
        ([0, 10, 10, 10, 10], 5, "3 restarts in a row never got past step 10"),
        ([0, 10, 10, 10, 20, 20, 20], 9, None),  # what it got to in between counts
        ([0, 10, 10, 10, 20, 20, 20, 20], 9, "3 restarts in a row never got past step 20"),
        (list(range(9)), 9, None),
        ([30, 20, 20, 20], 9, None),  # the newest checkpoint was taken away: no restart yet
    ],
)
def test_when_it_is_given_up(reached: list[int], most: int, said: str | None) -> None:
    reason = find_stop_reason([frozenset({step}) for step in reached], most)
    assert reason is None if said is None else said in (reason or "")


@pytest.mark.parametrize("keep_last", [2, 9])
def test_what_saves_below_a_damaged_checkpoint_goes_on(keep_last: int, tmp_path: Path) -> None:
    """Step 300 has a flipped byte, and each start resumes from the newest sound one."""
    (tmp_path / "checkpoints/step-00000200").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000300").mkdir()
    (tmp_path / "logs").mkdir()
    start, said = Starts(tmp_path, 220, 240, 260, 280, 300, 320, None), list[str]()
    start.keep_last = keep_last
    run_with_restarts(start, 9, tmp_path, said.append)
    steps = [220, 240, 260, 280, 280, 320]  # the new 300 takes the place of the damaged one
    assert [line.partition("resuming from step ")[2].partition(",")[0] for line in said] == list(
        map(str, steps)
    )


def test_a_clock_that_was_set_back_hides_nothing(tmp_path: Path) -> None:
    """`checkpoint.keep_every` keeps step 100, whose time lies ahead of all that follow."""
    kept = tmp_path / "checkpoints/step-00000100"
    kept.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    os.utime(kept, (time.time() + 3600,) * 2)
    start = Starts(tmp_path, 120, 140, 160, 180, 200, None)
    run_with_restarts(start, 9, tmp_path, lambda line: None)
    assert start.count == 6


class Starts:
    """A run of which it is written what each start comes to: a step that it saves before it fails,
    or its end.
    """

    def __init__(self, directory: Path, *saves: int | None) -> None:
        self.directory, self.saves, self.count, self.keep_last = directory, saves, 0, 9

    def __call__(self) -> None:
        step = self.saves[self.count]
        self.count += 1
        if step is None:
            return
        (self.directory / f"checkpoints/step-{step:08}").mkdir(parents=True, exist_ok=True)
        for old in sorted((self.directory / "checkpoints").iterdir())[: -self.keep_last]:
            old.rmdir()
        raise RankFailed(f"rank 1 was ended by SIGKILL\nin start {self.count}", 1)


def test_it_goes_on_until_it_is_done(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    start, said = Starts(tmp_path, 5, 5, 8, None), list[str]()
    run_with_restarts(start, 9, tmp_path, said.append)
    assert start.count == 4
    assert said == [
        f"rank 1 was ended by SIGKILL; resuming from step {step}, restart {number} of 9"
        for number, step in [(1, 5), (2, 5), (3, 8)]
    ]
    assert "in start 2\n" in (tmp_path / "logs/failures.log").read_text()


@pytest.mark.parametrize(
    ("most", "starts", "why"), [(9, 5, "3 restarts in a row"), (2, 3, "max_restarts = 2")]
)
def test_it_is_given_up(most: int, starts: int, why: str, tmp_path: Path) -> None:
    start, said = Starts(tmp_path, *[5, 6, *[6] * 9]), list[str]()
    with pytest.raises(RankFailed) as caught:
        run_with_restarts(start, most, tmp_path, said.append)
    assert (caught.value.exit_code, start.count, len(said)) == (
        GIVEN_UP_EXIT_CODE,
        starts,
        starts - 1,
    )
    message = str(caught.value)
    assert (
        message.startswith(f"given up after {starts} failures: ")
        and why in message
        and "step 6" in message
    )
    assert message.endswith(f"rank 1 was ended by SIGKILL\nin start {starts}")


def test_without_the_key_and_for_what_would_come_again_it_is_started_once(tmp_path: Path) -> None:
    start, said = Starts(tmp_path, 5, None), list[str]()
    with pytest.raises(RankFailed, match=r"\Arank 1 was ended by SIGKILL"):
        run_with_restarts(start, 0, tmp_path, said.append)

    def not_finite() -> None:
        raise RankFailed("the loss is NaN", 0, 17)

    with pytest.raises(RankFailed, match=r"\Athe loss is NaN\Z") as caught:
        run_with_restarts(not_finite, 9, tmp_path, said.append)
    assert (caught.value.exit_code, start.count, said) == (17, 1, [])
