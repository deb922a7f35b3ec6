"""SIGKILL to one rank or to all, at random moments of a run that saves in every step;
then the same command again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find, newest_valid
from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankError, RankPool
from tests.end_to_end.driving import (
    changed,
    differing,
    exact_losses,
    layout,
    run_config,
    size,
    tensors,
    train,
    train_rank,
)

KILLS = 50
"""Of each run."""
LIMIT_S = 240.0


def has_stepped(config: RunConfig, since_ns: int, from_step: int) -> bool:
    """Return whether a step beyond this one has been told since then;
    what a killed run told is still there at first.
    """
    metrics = run_directory(config.run) / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_mtime_ns <= since_ns:
        return False
    return metrics.read_bytes().count(b"\n") > from_step


def killed(
    pool: RankPool, config: RunConfig, ranks: list[int], after_s: float, starting: bool
) -> None:
    """Start the run, and kill these ranks a while after its next step; ``starting``:
    after its start.
    """
    missed: list[str] = []
    from_step, since_ns = newest_step(config), time.time_ns()

    def kill() -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while len(pool.pids()) < size(config) or not (
            starting or has_stepped(config, since_ns, from_step)
        ):
            if time.monotonic() > deadline_s:
                missed.append("no step was taken")
                break
            time.sleep(0.002)
        time.sleep(after_s)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(pool.pids()[rank], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankError, match=r"died of SIGKILL|gloo|Connection|failed after"):
        pool.run(train_rank, size(config), config, timeout_s=LIMIT_S)
    killer.join()
    assert not missed


def newest_step(config: RunConfig) -> int:
    found = find(run_directory(config.run))
    return found[0].step if found else 0


@pytest.mark.torture(row="SIGKILL of all or one rank at random moments around saves, then resume")
@pytest.mark.parametrize(
    ("text", "asynchronous"),
    [
        pytest.param(text, asynchronous, id=f"{text}-{'behind' if asynchronous else 'blocking'}")
        for text, asynchronous in (
            *itertools.product(["dp2", "pp2,tp2"], [True, False]),
            ("dp2,zero3,offload", True),
        )
    ],
)
def test_no_kill_loses_a_run(
    text: str,
    asynchronous: bool,
    corpus: Path,
    tmp_path: Path,
    seed: int,
    record_property: Callable[[str, Any], None],
) -> None:
    draw = random.Random(f"{seed} {text} {asynchronous}")
    sections: dict[str, Any] = {
        "parallel": layout(text),
        "optimizer": {"schedule": "constant"},
        "checkpoint": {"every": 1, "keep_last": 2, "asynchronous": asynchronous},
        "train": {"steps": 10**6},
    }
    config = run_config(corpus, tmp_path / "killed", **sections)
    lost = unreadable = 0
    with RankPool(size(config)) as pool:
        for _ in range(KILLS):
            before = newest_step(config)
            everyone = list(range(size(config)))
            whom = everyone if draw.random() < 0.5 else [draw.choice(everyone)]
            starting = draw.random() < 0.1
            killed(pool, config, whom, draw.uniform(0.0, 2.0 if starting else 0.6), starting)
            warned: list[str] = []
            found = newest_valid(run_directory(config.run), warn=warned.append)
            unreadable += len(warned)
            lost += (found.manifest.step if found else 0) < before
        steps = newest_step(config) + 2
        finished = changed(config, train={"steps": steps})
        train(pool, finished)
        plain = changed(
            finished, run={"directory": str(tmp_path / "plain")}, checkpoint={"every": 0}
        )
        pool.run(train_rank, size(plain), plain, timeout_s=LIMIT_S)
    assert (lost, unreadable) == (0, 0)
    assert exact_losses(finished) == exact_losses(plain)
    assert not differing(tensors(run_directory(finished.run)), tensors(run_directory(plain.run)))
    record_property("noted", f"{KILLS} kills, 0 lost, 0 unloadable, {steps} steps hex-equal")
