"""`meshwright train` as a process of its own: the ranks it starts, torchrun's,
and none of them left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright.tracking.jsonl import read_records
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
from tests.support.marks import long_row

pytestmark = pytest.mark.slow


def trapped(
    corpus: Path, runs: Path, rank: int, *, killed: bool = False, **sections: dict[str, Any]
) -> RunConfig:
    """Return a run in which one rank fails in its second step."""
    options = {**GPT2, "rank": rank, "at_call": 6, "killed": killed}
    model = {"builder": "tests.end_to_end.builders:trapped", "options": options}
    return run_config(
        corpus, runs, model=model, train={"steps": 1000}, checkpoint={"every": 1}, **sections
    )


TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "meshwright_launch",
)


@pytest.mark.parametrize("tp", [long_row(1), pytest.param(2, marks=pytest.mark.torture)])
def test_a_run_from_beginning_to_end(
    tp: int, corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """2 x 2 x tp killed in the middle, gone on with by the same command,
    and then the same numbers.
    """
    ranks = 4 * tp
    keys: dict[str, Any] = {"parallel": layout(f"dp2,pp2,tp{tp}"), "train": {"steps": 12}}
    same = run_config(corpus, tmp_path / "same", **keys)
    config = run_config(
        corpus, tmp_path / "runs", **keys, checkpoint={"every": 1}, tracking={"console": True}
    )
    file = written(config, tmp_path)
    with shell.start(
        ["-m", "meshwright_launch", "train", file], stdout=subprocess.DEVNULL
    ) as process:
        deadline_s = time.monotonic() + LIMIT_S
        while len(find(run_directory(config.run))) < 2:
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.01)
        process.kill()
    shell.wait_until_none_is_left()
    reached = find(run_directory(config.run))[0].step
    assert 2 <= reached < 12

    done = shell.run("-m", "meshwright_launch", "train", file)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
    placed = f"pp 2 x dp 2 x tp {tp} = {ranks} ranks on 1 node of {ranks}"
    assert said.startswith(f"starting {ranks} ranks on this machine\n{placed}\n")
    for line in (
        "batch      micro_batch_size 1 x chunks 4 x dp 2 = global_batch 8\n",
        "schedule   1f1b: 20.0% of the time is bubble",
        "\npp0 | F0 F1 .  .  B0--- F2",
        f"/checkpoints/step-{reached:08}: step {reached}, {8 * reached} samples seen\n",
        f"step {reached + 1:>2}/12  loss ",
        "step 12/12  loss ",
        "validation at step 12: loss ",
        f"saved {run_directory(config.run)}/checkpoints/step-00000012\n",
        "unigram baseline  ",
    ):
        assert line in said, line
    assert max(len(line) for line in said.splitlines() if str(tmp_path) not in line) <= 80
    train(pool, same)
    assert exact_losses(config) == exact_losses(same)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(same.run)))

    run = run_directory(config.run)
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, reached]
    assert {start["layout"] for start in starts} == {f"pp2 dp2 tp{tp}"}
    assert (run / "placement.txt").read_text().startswith(placed)
    again = [record for record in read_records(run / "metrics.jsonl") if record.step > reached]
    assert {record.restarts for record in again} == {1}
    assert all(0 < record.save_s < LIMIT_S for record in again if record.save_s is not None)
    assert any(record.save_s is not None for record in again)


@pytest.mark.long
def test_the_same_under_torchrun(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    same = with_own_samples(run_config(corpus, tmp_path / "same", parallel=layout("pp2")))
    config = run_config(
        corpus, tmp_path / "runs", parallel=layout("pp2"), launch={"max_restarts": 1}
    )
    config = with_own_samples(config)
    done = shell.run(*TORCHRUN, "train", written(config, tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("= 2 ranks on 1 node of 2") == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("launch.max_restarts has no effect here") == 1
    train(pool, same)
    assert exact_losses(config) == exact_losses(same)


def ignore_as_the_job_script() -> None:
    """What `trap "" USR1 USR2; exec torchrun` does to the processes
    that follow (templates/job.sbatch.j2).
    """
    for each in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)


@pytest.mark.long
def test_a_signal_that_torchrun_ignores_is_for_its_ranks(
    corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    """USR2 to all processes, as Slurm sends it before a time limit: the ranks save,
    and torchrun ends with its 1.
    """
    keys: dict[str, Any] = {
        "parallel": layout("dp2"),
        "train": {"steps": 100000},
        "checkpoint": {"every": 0},
    }
    config = run_config(corpus, tmp_path, **keys)
    metrics = run_directory(config.run) / "metrics.jsonl"
    with shell.start(
        [*TORCHRUN, "train", written(config, tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=ignore_as_the_job_script,
    ) as process:
        deadline_s = time.monotonic() + LIMIT_S
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.02)
        for pid in shell.alive():
            os.kill(pid, signal.SIGUSR2)
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            shell.end_all()
    step = lines(config)[-1]["step"]
    assert (
        process.returncode == 1
        and f"stopped by SIGUSR2 after step {step} of 100000; it is saved" in said
    ), said
    assert [checkpoint.step for checkpoint in find(run_directory(config.run))] == [step]


@pytest.mark.torture
@pytest.mark.parametrize(("text", "rank", "killed"), [("dp2,pp2", 3, False), ("dp2", 1, True)])
def test_a_rank_that_fails_ends_the_run(
    text: str, rank: int, killed: bool, corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    config = trapped(corpus, tmp_path, rank, killed=killed, parallel=layout(text))
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == 1
    assert [line["step"] for line in lines(config)] == [1]
    first, *rest = done.stderr.splitlines()
    if killed:
        assert first.startswith(f"meshwright: error: rank {rank} was ended by SIGKILL")
        assert "Traceback" not in done.stderr
    else:
        assert (
            first
            == f"meshwright: error: rank {rank}: ArithmeticError: the layer of a user has failed"
        )
        assert any("builders.py" in line for line in rest) and done.stderr.count("Traceback") == 1
    assert [found.step for found in find(run_directory(config.run))] == [1]


@pytest.mark.torture
def test_a_rank_that_fails_ends_the_run_under_torchrun(
    corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    config = trapped(corpus, tmp_path, 1, parallel=layout("dp2"))
    done = shell.run(*TORCHRUN, "train", written(config, tmp_path))
    assert done.returncode == 1
    own = [line for line in done.stderr.splitlines() if line.startswith("meshwright: error: ")]
    assert own[0].startswith("meshwright: error: rank 1: Traceback")
    assert "ArithmeticError: the layer of a user has failed" in done.stderr


@pytest.mark.torture
def test_bad_input_under_torchrun_is_said_once(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    config = run_config(corpus, tmp_path, parallel=layout("dp2,pp2"))
    done = shell.run(*TORCHRUN, "train", written(config, tmp_path))
    assert done.returncode != 0 and done.stdout == ""
    assert (
        done.stderr.count("meshwright: error: dp 2 x pp 2 x tp 1 = 4 ranks, but 2 were started")
        == 1
    )


@pytest.mark.torture
def test_no_port_under_torchrun(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """torchrun hands 0 on as it is, and its ranks would wait for each other."""
    config = run_config(corpus, tmp_path, parallel=layout("dp2"))
    words = [word.replace("--standalone", "--master-port=0") for word in TORCHRUN]
    done = shell.run(*words, "train", written(config, tmp_path))
    assert done.returncode != 0 and done.stderr.count("meshwright: error: MASTER_PORT = 0") == 1


@pytest.mark.torture
def test_a_resume_that_is_refused(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """All ranks find it; it is said once, without a traceback."""
    config = run_config(corpus, tmp_path, parallel=layout("dp2"), train={"steps": 2})
    file = written(config, tmp_path)
    assert shell.run("-m", "meshwright_launch", "train", file).returncode == 0
    done = shell.run("-m", "meshwright_launch", "train", file, "--run.seed=9")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        done.stderr.startswith("meshwright: error: ")
        and done.stderr.count("meshwright: error: ") == 1
    )
    assert done.stderr.count("run.seed was 1234 and is 9") == 1


def _close_all() -> None:
    for descriptor in (0, 1, 2):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("text", "nobody"),
    [
        pytest.param("dp2", "closed", marks=pytest.mark.torture),
        pytest.param("dp2", "all closed", marks=pytest.mark.torture),
        pytest.param("dp2", "has left", marks=pytest.mark.torture),
        pytest.param("", "full", marks=pytest.mark.torture),
    ],
)
def test_nobody_needs_to_listen(
    text: str, nobody: str, corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    """stdout is closed from the start, its reader has gone, or the disk behind it is full:
    the run is made.
    """
    config = run_config(
        corpus, tmp_path, parallel=layout(text), train={"steps": 3}, tracking={"console": True}
    )
    reader, left = os.pipe()
    os.close(reader)
    with os.fdopen(left, "wb") as gone, Path("/dev/full").open("wb") as full:
        how: dict[str, dict[str, Any]] = {
            "closed": {"preexec_fn": lambda: os.close(1)},
            "all closed": {"preexec_fn": _close_all},
            "has left": {"stdout": gone},
            "full": {"stdout": full},
        }
        done = shell.run(
            "-m", "meshwright_launch", "train", written(config, tmp_path), **how[nobody]
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert [line["step"] for line in lines(config)] == [1, 2, 3]
    assert [found.step for found in find(run_directory(config.run))] == [3]
