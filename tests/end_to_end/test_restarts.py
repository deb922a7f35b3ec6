"""`launch.max_restarts`: a run that failed goes on by itself to the same numbers,
or is given up with one message.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    GPT2,
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    tensors,
    train,
    with_own_samples,
)
from tests.end_to_end.shell import LIMIT_S, Shell, written

pytestmark = pytest.mark.slow


def trapped(corpus: Path, runs: Path, text: str, max_restarts: int, **trap: Any) -> RunConfig:
    model = {"builder": "tests.end_to_end.builders:trapped", "options": {**GPT2, **trap}}
    keys: dict[str, Any] = {"train": {"steps": 5}, "launch": {"max_restarts": max_restarts}}
    config = run_config(
        corpus, runs, model=model, parallel=layout(text), checkpoint={"every": 2}, **keys
    )
    return with_own_samples(config)


@pytest.mark.long
def test_it_goes_on_by_itself_to_the_same_numbers(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """Rank 1 is killed in step 4; the checkpoint is of step 2,
    and step 3 is taken twice and counts once.
    """
    trap = {"rank": 1, "at_call": 14, "killed": True, "once": str(tmp_path / "fired")}
    config = trapped(corpus, tmp_path / "runs", "dp2", 1, **trap)
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == 0, done.stderr
    (said,) = done.stderr.splitlines()
    assert said.startswith("meshwright: rank 1 was ended by SIGKILL")
    assert said.endswith("; resuming from step 2, restart 1 of 1")
    same = trapped(corpus, tmp_path / "same", "dp2", 0, **trap)  # the trap has fired
    train(pool, same)
    assert len(lines(config)) == 5 and exact_losses(config) == exact_losses(same)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(same.run)))


@pytest.mark.torture(row="crash loops")
def test_what_always_fails_is_given_up(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """In its second step, before anything is saved. One rank,
    which is a process of its own here.
    """
    config = trapped(corpus, tmp_path, "", 9, rank=0, at_call=12)
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == 93, done.stderr
    cause = "rank 0: ArithmeticError: the layer of a user has failed"
    *restarts, given_up, last = done.stderr.split("\nTraceback")[0].splitlines()
    assert restarts == [
        f"meshwright: {cause}; resuming from step 0, restart {n} of 9" for n in (1, 2, 3)
    ]
    assert given_up.startswith(
        "meshwright: error: given up after 4 failures: 3 restarts in a row never got past step 0"
    )
    assert last == cause and done.stderr.count("Traceback") == 1
    assert (run_directory(config.run) / "logs/failures.log").read_text().count(
        "\nArithmeticError: "
    ) == 4


@pytest.mark.torture(row="crash loops")
def test_a_signal_while_it_starts_again_ends_it(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    config = trapped(
        corpus, tmp_path, "", 3, rank=0, at_call=1, killed=True, once=str(tmp_path / "fired")
    )
    file = written(
        config.model_copy(update={"train": config.train.model_copy(update={"steps": 100000})}),
        tmp_path,
    )
    with shell.start(
        ["-m", "meshwright_launch", "train", file],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None and "restart 1 of 3" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) in (-signal.SIGTERM, 128 + signal.SIGTERM, 85)
        assert "restart" not in process.stderr.read()
