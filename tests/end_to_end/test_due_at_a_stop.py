"""What is due in the step of a stop is not lost:
records and callbacks of the resumed run are the undisturbed one's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find, open_checkpoint
from meshwright.config import RunConfig
from meshwright.errors import CallbackError, CheckpointError, Preempted
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.run.directory import run_directory
from meshwright.run.resume import saved_reason
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.end_to_end.driving import (
    LATER,
    changed,
    differing,
    layout,
    lines,
    run_config,
    size,
    tensors,
)
from tests.support.errors import has_code

STEPS, PATIENCE = 9, 3
OF_THE_MACHINE = (
    "_s",
    "_s_",
    "tokens_per",
    "tflops",
    "mfu",
    "memory",
    "bubble",
    "restarts",
    "straggler",
    "time",
)
"""Parts of the names of metrics that differ between two equal runs."""


class Patience(Observer):
    """Ends the run at the third validation, and records what it has seen."""

    def __init__(self, parts: Parts) -> None:
        self.seen: list[tuple[int, float]] = []

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        event.metrics["patience/seen"] = len(self.seen)
        if event.validation_loss is None:
            return
        self.seen.append((parts.state.step, event.validation_loss))
        event.metrics["patience/sum"] = sum(loss for _, loss in self.seen)
        if len(self.seen) == PATIENCE and parts.mesh.rank == parts.mesh.grid.size - 1:
            parts.request_stop("three validations")

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = [(step, loss) for step, loss in state["seen"]]


class Alarm(Observer):
    """Sends a signal to its own process, the last rank, in the step that a file names."""

    def __init__(self, parts: Parts) -> None:
        self.file = run_directory(parts.config.run) / "alarm"

    def before_step(self, parts: Parts) -> None:
        if parts.mesh.rank != parts.mesh.grid.size - 1 or not self.file.exists():
            return
        if int(self.file.read_text()) == parts.state.step + 1:
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGTERM)


class Failing(Observer):
    """Fails after the fourth step, on the last rank."""

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        if parts.state.step == 4 and parts.mesh.rank == parts.mesh.grid.size - 1:
            raise ArithmeticError("the fourth step")


def failing(parts: Parts) -> Observer:
    return Failing()


def patience(parts: Parts) -> Observer:
    return Patience(parts)


def alarm(parts: Parts) -> Observer:
    return Alarm(parts)


def one_start(rank: int, world_size: int, config: RunConfig) -> str:
    """One start of a run in a rank: its end."""
    handlers = {
        each: signal.getsignal(each) for each in signal.valid_signals() if each not in (9, 19)
    }
    try:
        work(config)
    except (Preempted, CallbackError) as stopped:
        return str(stopped)
    finally:
        for each, handler in handlers.items():
            if handler is not None:
                signal.signal(each, handler)
    return "ended"


def of_run(corpus: Path, runs: Path, text: str, **train: Any) -> RunConfig:
    callbacks = tuple(
        f"tests.end_to_end.test_due_at_a_stop:{name}" for name in ("patience", "alarm")
    )
    keys = {"steps": STEPS, "validate_every": 2, "callbacks": callbacks, **train}
    return run_config(corpus, runs, parallel=layout(text), train=keys)


def records(config: RunConfig) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without what a clock or a memory has measured."""
    found = lines(config)
    return [
        {
            name: value
            for name, value in line.items()
            if not any(part in name for part in OF_THE_MACHINE)
        }
        for line in found
    ]


def saved_state(config: RunConfig) -> tuple[int, dict[str, Any]]:
    """Return the step and the state of the newest checkpoint."""
    with open_checkpoint(find(run_directory(config.run))[0].path) as checkpoint:
        return checkpoint.manifest.step, checkpoint.manifest.state


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("dp2", 4),  # a validation is due
        ("", 6),  # and its loss makes the callback end the run, in the next step
        LATER("", 3),  # nothing is due
        LATER("pp2", 2),
        LATER("dp2,tp2", 6),
        # the step in which the callback ends the run: it is complete, whatever the signal
        LATER("dp2,zero3", 7),
        LATER("tp2", 8),
    ],
)
def test_a_stopped_and_resumed_run_is_the_undisturbed_one(
    text: str, when: int, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    undisturbed = of_run(corpus, tmp_path / "undisturbed", text)
    assert set(pool.run(one_start, size(undisturbed), undisturbed)) == {"ended"}
    assert saved_state(undisturbed)[0] == 7, "the callback has ended it"

    stopped = of_run(corpus, tmp_path / "stopped", text)
    run_directory(stopped.run).mkdir(parents=True)
    (run_directory(stopped.run) / "alarm").write_text(str(when))
    said = pool.run(one_start, size(stopped), stopped)
    if when < 7:
        assert all(f"after step {when} of {STEPS}; it is saved" in text for text in said)
        assert saved_state(stopped)[0] == when == lines(stopped)[-1]["step"]
        assert ("validation/loss" in lines(stopped)[-1]) == (when % 2 == 0)
        said = pool.run(one_start, size(stopped), stopped)
    assert set(said) == {"ended"}, (
        "no signal is waited for, and the scheduler is not asked for another start"
    )
    assert records(stopped) == records(undisturbed)
    assert saved_state(stopped) == saved_state(undisturbed)
    assert not differing(
        tensors(run_directory(stopped.run)), tensors(run_directory(undisturbed.run))
    )


@pytest.mark.parametrize("text", ["dp2", LATER("pp2")])
def test_an_error_of_a_callback_is_not_lost_beside_a_signal(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """A resumed run would train on as if nothing had happened: the step is done."""
    name = "tests.end_to_end.test_due_at_a_stop:failing"
    config = of_run(corpus, tmp_path, text)
    config = changed(config, train={"callbacks": (*config.train.callbacks, name)})
    run_directory(config.run).mkdir(parents=True)
    (run_directory(config.run) / "alarm").write_text("4")
    for said in pool.run(one_start, size(config), config):
        assert (
            "callback Failing.after_step failed after step 4" in said and "the fourth step" in said
        )
    assert saved_state(config)[0] == 4 and not (run_directory(config.run) / "alarm").exists()


def test_a_run_that_a_callback_has_ended_trains_on(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """The request was fulfilled, and is in no checkpoint; one at the last step asks for nothing."""
    config = of_run(corpus, tmp_path, "")
    pool.run(one_start, 1, config)
    assert "stop_reason" not in saved_state(config)[1]
    pool.run(one_start, 1, config)
    assert saved_state(config)[0] == STEPS
    ended = of_run(corpus, tmp_path / "at the end", "", steps=6)
    pool.run(one_start, 1, ended)
    assert saved_state(ended)[0] == 6 and "stop_reason" not in saved_state(ended)[1]
    pool.run(one_start, 1, changed(ended, train={"steps": STEPS}))
    assert saved_state(ended)[0] == STEPS


def test_a_request_in_a_checkpoint_is_a_text(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    config = of_run(corpus, tmp_path, "")
    run_directory(config.run).mkdir(parents=True)
    (run_directory(config.run) / "alarm").write_text("6")
    pool.run(one_start, 1, config)
    assert saved_state(config)[1]["stop_reason"] == "three validations"
    with open_checkpoint(find(run_directory(config.run))[0].path) as checkpoint:
        manifest = checkpoint.manifest
    for wrong in (7, ["a"], {"a": 1}, True):
        forged = manifest.model_copy(update={"state": {**manifest.state, "stop_reason": wrong}})
        with pytest.raises(
            CheckpointError, match=r"state\.stop_reason = ", check=has_code("MW-RUN-039")
        ):
            saved_reason(forged)
