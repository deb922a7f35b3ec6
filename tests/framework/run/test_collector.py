"""The garbage collector runs between steps, when it is due,
and is Python's own again after training.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.parts import Observer, Parts
from meshwright.run.collector import StepCollector
from tests.launch.test_python import losses_of, made
from tests.support.marks import long_row


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    """As in a fresh process: a `plan` in this one has disabled the collector for good,
    what all tests share is frozen, and its thresholds are higher.
    """
    was_frozen, thresholds = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.unfreeze()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    yield
    gc.unfreeze()
    gc.enable()
    gc.set_threshold(*thresholds)
    if was_frozen:
        gc.freeze()


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations collected, in order."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def allocate() -> None:
    """Allocate enough objects to start Python's collector many times over."""
    assert len([[] for _ in range(20_000)]) == 20_000


@pytest.mark.parametrize(
    ("every", "due"), [long_row(1, [1, 2, 3, 4, 5, 6, 7]), long_row(3, [1, 4, 7]), (50, [1])]
)
def test_collections_are_after_the_first_step_and_then_every_so_many(
    every: int, due: list[int], collections: list[int]
) -> None:
    with StepCollector(every) as collector:
        collected = []
        for step in range(1, 8):
            if step > 1:
                allocate()
                assert not collections, "inside of a step"
            else:
                collections.clear()
            collector.after_step()
            if collections == [2]:
                collected.append(step)
            collections.clear()
        assert collected == due
    allocate()
    assert collections, "Python's own again"


def test_what_the_first_step_leaves_is_skipped_until_the_end() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), StepCollector(2) as collector:
        collector.after_step()
        assert gc.get_freeze_count() > 1000 and not gc.isenabled()
        raise KeyError
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_zero_leaves_the_collector_to_python() -> None:
    with StepCollector(0) as collector:
        collector.after_step()
        assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_process_keeps_its_own_choice(was_enabled: bool) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    if not was_enabled:
        gc.disable()
    with StepCollector(1) as collector:
        collector.after_step()
        assert not gc.isenabled()
    assert gc.isenabled() == was_enabled
    assert gc.get_freeze_count() >= frozen - 1000, "frozen before, frozen after"


class States(Observer):
    """Keeps the state of the collector before each step: enabled,
    and whether anything is frozen.
    """

    def __init__(self) -> None:
        self.found: list[tuple[bool, bool]] = []

    def before_step(self, parts: Parts) -> None:
        self.found.append((gc.isenabled(), gc.get_freeze_count() > 0))


@pytest.mark.long
def test_a_run_trains_without_the_collector_and_gives_it_back(tmp_path: Path) -> None:
    """And the losses are those of a run that leaves the collector to Python."""
    losses = []
    for every, after_first in ((2, (False, True)), (0, (True, False))):
        states, name = States(), f"every-{every}"
        meshwright.run_training(
            made(tmp_path, run={"name": name}, train={"gc_every": every}), [states]
        )
        assert states.found == [(True, False), *[after_first] * 5]
        assert gc.isenabled() and gc.get_freeze_count() == 0
        losses.append(losses_of(tmp_path, name))
    assert losses[0] == losses[1] and len(losses[0]) == 6
