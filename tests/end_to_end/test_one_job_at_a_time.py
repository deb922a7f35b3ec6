"""Two jobs, one run directory: the second leaves with one message that names the first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright.run.lock import FILE, PATIENCE_S, RunLock
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import layout, lines, refused_rank, run_config
from tests.end_to_end.shell import LIMIT_S, Shell, written


def test_all_ranks_are_refused_alike(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    config = run_config(corpus, tmp_path, parallel=layout("dp2"))
    run_directory(config.run).mkdir()
    with RunLock(run_directory(config.run)):
        said = [text for text, _ in pool.run(refused_rank, 2, config)]
    assert said[0].startswith(f"process {os.getpid()} on ") and said == [said[0]] * 2
    assert [file.name for file in run_directory(config.run).iterdir()] == [FILE]
    assert pool.run(refused_rank, 2, config) == [("not refused", 0)] * 2


def steps_of(config: RunConfig) -> int:
    """Return the last step on record; 0 before the first."""
    metrics = run_directory(config.run) / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return max((int(step) for step in re.findall(r'"step": ?(\d+)', text)), default=0)


def begun(shell: Shell, config: RunConfig, file: str) -> subprocess.Popen[str]:
    """Start a run and return it when it has taken two steps more than the one before it."""
    before = steps_of(config)
    process = shell.start(
        ["-m", "meshwright_launch", "train", file],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline_s = time.monotonic() + LIMIT_S
    while steps_of(config) < before + 2:
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.torture(row="two jobs, one run directory: the second leaves")
@pytest.mark.parametrize("text", ["dp2", ""])
def test_the_second_job_leaves(text: str, corpus: Path, tmp_path: Path, shell: Shell) -> None:
    keys: dict[str, Any] = {
        "parallel": layout(text),
        "train": {"steps": 100000},
        "checkpoint": {"every": 1},
    }
    config = run_config(corpus, tmp_path, **keys)
    file = written(config, tmp_path)
    shell.environment["SLURM_JOB_ID"] = "4711"
    first = begun(shell, config, file)
    ranks = set(shell.alive())
    holder = json.loads((run_directory(config.run) / FILE).read_text())
    assert holder["process"] in ranks

    began_s = time.monotonic()
    assert (
        shell.run("-m", "meshwright_launch", "train", file, "--train.steps=0").returncode == 2
    )  # read the file, say no
    refused_s = time.monotonic()
    second = shell.run("-m", "meshwright_launch", "train", file)
    took_s = time.monotonic() - refused_s
    assert second.returncode == 2 and second.stdout == ""
    assert re.fullmatch(
        rf"meshwright: error: process {holder['process']} of Slurm job 4711 on"
        rf" {re.escape(os.uname().nodename)}, "
        rf"since {re.escape(holder['since'])}, works in {re.escape(str(run_directory(config.run)))}:"
        r" .*\n",
        second.stderr,
    ), second.stderr
    assert took_s < PATIENCE_S + 1 + 2 * (refused_s - began_s), (
        "it has waited for more than the lock"
    )
    assert first.poll() is None and set(shell.alive()) == ranks

    for pid in shell.alive():
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    shell.wait_until_none_is_left()
    reached = lines(config)[-1]["step"]
    again = begun(shell, config, file)
    again.send_signal(signal.SIGTERM)
    _, said = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 85, said
    assert lines(config)[-1]["step"] >= reached


@pytest.mark.torture(row="two jobs, one run directory: the second leaves")
def test_two_jobs_at_the_same_time_under_torchrun(
    corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    """The ranks take the lock themselves: nobody looked before."""
    config = run_config(corpus, tmp_path, parallel=layout("dp2"))
    run_directory(config.run).mkdir()
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "meshwright_launch",
    )
    with RunLock(run_directory(config.run)):
        done = shell.run(*torchrun, "train", written(config, tmp_path))
    assert done.returncode != 0
    assert (
        f"process {os.getpid()} on " in done.stderr
        and "Traceback" not in done.stderr.split("torch")[0]
    )
    assert [file.name for file in run_directory(config.run).iterdir()] == [FILE]
