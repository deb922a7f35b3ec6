"""A quarter of an hour of all that happens to a run on a cluster,
and the numbers of a run that was left alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.errors import HangError
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    changed,
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    tensors,
    train_rank,
)
from tests.end_to_end.shell import LIMIT_S, Shell, written

FAULTS = ("kill a rank", "kill all ranks", "kill the launcher", "SIGTERM", "stop a rank", "damage")
ENDS = {
    "SIGTERM": (85, HangError.exit_code, 128 + signal.SIGTERM, -signal.SIGTERM),
    "kill the launcher": (-signal.SIGKILL,),
}
"""What ends the run as a whole, and how: who is asked to end has saved, or cannot for a rank that
was stopped before, or has not begun. All else it gets over by itself.
"""
HANG_S = 20.0


def ranks_alive(config: RunConfig, shell: Shell) -> list[int]:
    """Processes of all ranks but the first, as their logs name them, that live."""
    pids = []
    for log in sorted((run_directory(config.run) / "logs").glob("rank-*.log")):
        found = re.findall(
            r"^=== started .* process (\d+) ===$", log.read_text(errors="replace"), re.MULTILINE
        )
        pids += [int(found[-1])] if found else []
    alive = shell.alive()
    return [pid for pid in pids if pid in alive]


def damage_newest(config: RunConfig, draw: random.Random) -> None:
    """One byte of the newest checkpoint, if an older one stands behind it."""
    found = find(run_directory(config.run))
    if len(found) > 1:
        with contextlib.suppress(OSError):
            path = draw.choice(sorted(found[0].path.iterdir()))
            data = bytearray(path.read_bytes())
            data[draw.randrange(len(data))] ^= 1
            path.write_bytes(data)


def strike(fault: str, config: RunConfig, shell: Shell, launcher: int, draw: random.Random) -> None:
    """Do it, to whoever is there."""
    ranks = ranks_alive(config, shell)
    if fault == "damage":
        damage_newest(config, draw)
        fault = "kill a rank"  # otherwise nobody would read it
    signum = {"SIGTERM": signal.SIGTERM, "stop a rank": signal.SIGSTOP}.get(fault, signal.SIGKILL)
    if fault in ENDS:
        whom = [launcher]
    elif fault == "kill all ranks":
        whom = ranks
    else:
        whom = [draw.choice(ranks)] if ranks else []
    for pid in whom:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


@pytest.mark.torture(row="a soak of random faults with automatic restart")
def test_a_run_under_fire_ends_as_one_that_was_left_alone(
    corpus: Path,
    tmp_path: Path,
    shell: Shell,
    seed: int,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, Any], None],
) -> None:
    draw = random.Random(seed)
    config = run_config(
        corpus,
        tmp_path / "soaked",
        parallel=layout("dp2,pp2"),
        train={"steps": 10**6},
        optimizer={"schedule": "constant"},
        checkpoint={"every": 5, "keep_last": 3},
        launch={"max_restarts": 10**6, "timeout_s": HANG_S},
    )
    command = ["-m", "meshwright_launch", "train", written(config, tmp_path)]
    struck: Counter[str] = Counter()
    ended: Counter[int] = Counter()
    begin_s = time.monotonic()
    end_s = begin_s + 60 * request.config.getoption("--soak-minutes")
    said = (tmp_path / "said").open("a")
    process = shell.start(command, stdout=said, stderr=said)
    while time.monotonic() < end_s:
        pause_s, fault = draw.uniform(8, 25), draw.choice(FAULTS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(pause_s)
        lives = process.poll() is None
        if lives:
            strike(fault, config, shell, process.pid, draw)
            struck[fault] += 1
            if fault in ENDS:
                process.wait(LIMIT_S)
        if process.poll() is not None:  # what a scheduler does then: the same command again
            ended[process.returncode] += 1
            assert lives and process.returncode in ENDS.get(fault, ()), (
                fault,
                (tmp_path / "said").read_text()[-2000:],
            )
            shell.wait_until_none_is_left()
            process = shell.start(command, stdout=said, stderr=said)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)
    passed_s = time.monotonic() - begin_s
    shell.wait_until_none_is_left()
    useful_s = sum(line["perf/step_s"] for line in lines(config))

    finished = changed(config, train={"steps": find(run_directory(config.run))[0].step + 5})
    plain = changed(finished, run={"directory": str(tmp_path / "plain")}, checkpoint={"every": 0})
    with RankPool(4) as pool:
        for each in (finished, plain):
            pool.run(train_rank, 4, each, timeout_s=3600)
    assert exact_losses(finished) == exact_losses(plain)
    assert not differing(tensors(run_directory(finished.run)), tensors(run_directory(plain.run)))
    record_property(
        "noted",
        f"{sum(struck.values())} faults in {passed_s / 60:.0f} min, {finished.train.steps} steps,"
        f" loss hex-equal, {useful_s / passed_s:.0%} of the time in steps that count",
    )
