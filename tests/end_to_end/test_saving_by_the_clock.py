"""Checkpoints by the clock: ``checkpoint.every_minutes`` saves on every layout,
decided by rank 0 alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright.run.saving
from meshwright.checkpoint import find
from meshwright.config import Checkpoint, RunConfig
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.end_to_end.driving import LATER, layout, run_config, size, train

MINUTE_S, STEPS = 60.0, 9


class Clock:
    """The clock of one rank: in every step ``minutes`` pass."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self.now_s = minutes, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def pass_step(self) -> None:
        self.now_s += self.minutes * MINUTE_S


class EachStep(Observer):
    """Moves the clock before each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def before_step(self, parts: Parts) -> None:
        self.clock.pass_step()

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        event.metrics["own/saving"] = float(event.is_saving)


def with_clock(rank: int, world_size: int, config: RunConfig, first: float, others: float) -> None:
    """Train with a clock on which so many minutes pass in a step,
    on the first rank and on the others.
    """
    clock = Clock(first if rank == 0 else others)
    real, meshwright.run.saving.time = (
        meshwright.run.saving.time,
        SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep),  # type: ignore[assignment]
    )
    try:
        work(config, observers=[EachStep(clock)])
    finally:
        meshwright.run.saving.time = real


def of_clock(corpus: Path, runs: Path, text: str, **checkpoint: Any) -> RunConfig:
    keys = {"keep_last": 100, "asynchronous": False, **checkpoint}
    return run_config(corpus, runs, parallel=layout(text), train={"steps": STEPS}, checkpoint=keys)


def saved_steps(config: RunConfig) -> list[int]:
    return sorted(each.step for each in find(run_directory(config.run)))


@pytest.mark.parametrize(
    ("text", "first", "others", "keys", "steps"),
    [
        ("dp2", 11.0, 0.0, {}, [3, 6, 9]),  # the default: half an hour
        ("dp2", 0.0, 1e6, {}, [9]),  # the clocks of others do not count
        ("", 11.0, 0.0, {"every_minutes": 0}, [9]),
        # a save of either kind starts the half hour anew
        ("", 11.0, 0.0, {"every": 5}, [3, 5, 8, 9]),
        ("", 100.0, 0.0, {"every_minutes": 1.5, "keep_last": 2}, [8, 9]),
        LATER("pp2", 11.0, 0.0, {}, [3, 6, 9]),
        LATER("tp2", 11.0, 5.0, {}, [3, 6, 9]),
        LATER("dp2,zero3", 16.0, 0.0, {}, [2, 4, 6, 8, 9]),
        LATER("cp2", 40.0, 0.0, {"every_minutes": 60}, [2, 4, 6, 8, 9]),
    ],
)
def test_saves_by_the_clock_of_the_first_rank(
    text: str, first: float, others: float, keys: dict[str, Any], steps: list[int], corpus: Path, tmp_path: Path,
    pool: RankPool,
) -> None:  # fmt: skip
    config = of_clock(corpus, tmp_path, text, **keys)
    pool.run(with_clock, size(config), config, first, others)
    assert saved_steps(config) == steps


def test_a_default_run_saves_every_half_hour() -> None:
    assert Checkpoint().every_minutes == 30.0 and Checkpoint().every == 0


def test_a_short_run_saves_as_before(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    config = run_config(corpus, tmp_path, parallel=layout("dp2"))
    train(pool, config)
    assert saved_steps(config) == [6]


def test_a_save_in_progress_is_not_waited_for(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    """A disk that takes longer than the interval:
    the next save comes when the one before has ended.
    """
    config = of_clock(corpus, tmp_path, "", asynchronous=True)
    assert pool.run(due_while_writing, 1, config) == [[False, False, True, True]]


def due_while_writing(rank: int, world_size: int, config: RunConfig) -> list[bool]:
    """Return whether a save is due: at once, an hour later while a save is written, after it, and at
    once after a resume from memory.
    """
    clock, writer = Clock(60.0), SimpleNamespace(is_share_done=lambda: False)
    saver: Any = object.__new__(meshwright.run.saving.Saver)
    saver.parts, saver.writer, saver._begun_s = SimpleNamespace(config=config), writer, 0.0
    saver._is_overdue = False
    real, meshwright.run.saving.time = meshwright.run.saving.time, clock  # type: ignore[assignment]
    try:
        found = [saver.is_due()]
        clock.pass_step()
        found.append(saver.is_due())
        writer.is_share_done = lambda: True
        found.append(saver.is_due())
        clock.now_s, saver._is_overdue = 0.0, True  # resumed from memory
        return [*found, saver.is_due()]
    finally:
        meshwright.run.saving.time = real
