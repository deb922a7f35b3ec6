"""The exit code of a node under torchrun: that of the rank that failed first,
in real runs that fail.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from meshwright.errors import DataError
from meshwright_launch.cli import main
from meshwright_launch.failure import (
    FAILURES,
    FailureRecord,
    describe,
    leave_exit_code,
    leave_record,
    read_failures,
)
from meshwright_launch.restarts import RECURRING_EXIT_CODES, TRANSIENT_EXIT_CODES

CONFIG = """
run = {{ name = "pod", directory = "{directory}" }}
model = {{ builder = "meshwright_models.gpt2:build", options = {{ {options} }} }}
data = {{ train = "", builder = "tests.launch.test_pod:{data}" }}
batch = {{ micro_batch_size = 2, chunks = 1 }}
train = {{ steps = 50, device = "cpu", validate_steps = 1 }}
parallel = {{ dp = 2 }}
optimizer = {{ learning_rate = {rate} }}
tracking = {{ console = false, trace_step = 0 }}
"""
OPTIONS = (
    "vocab_size = 64, hidden_size = 16, num_layers = 2, num_heads = 2, max_sequence_length = 16"
)
ROOT = Path(__file__).parents[2]


class Rank1Fails(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, and an error of rank 1 alone in a later step."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index > 40 and os.environ.get("RANK") == "1" and torch.distributed.is_initialized():
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raises":
                raise DataError("MW-TEST-001", "sample 41 is damaged")
        ids = torch.randint(64, (17,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


def raises(split: str) -> Any:
    return Rank1Fails("raises") if split == "train" else None


def killed(split: str) -> Any:
    return Rank1Fails("killed") if split == "train" else None


def sound(split: str) -> Any:
    return Rank1Fails("") if split == "train" else None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def pod(
    config: Path, *words: str, nodes: int = 1, node: int = 0, port: int = 0
) -> subprocess.Popen[str]:
    """Start a pod with two ranks on one node, or with one on each of two."""
    torchrun = [f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}", f"--node-rank={node}"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port or free_port()}"]
    run = (
        "import sys; from meshwright_launch.pod import main; sys.exit(main(sys.argv[1:], echo_s=6))"
    )
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            run,
            *torchrun,
            "-m",
            "meshwright_launch",
            "train",
            str(config),
            *words,
        ],
        env=os.environ
        | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> int:
    """Return the exit code; print what the pod has said."""
    print(process.communicate(timeout=120)[1])
    return process.returncode


def write(folder: Path, data: str = "sound", rate: str = "1e-3") -> Path:
    path = folder / "run.toml"
    path.write_text(CONFIG.format(directory=folder, options=OPTIONS, data=data, rate=rate))
    return path


@pytest.mark.long
def test_the_command_in_the_jobset_ends_with_the_code_of_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path)
    words = ["--nodes=1", "--devices-per-node=2", "--image=i"]
    assert main(["kubernetes", str(config), *words, "--train.steps=3"]) == 0
    (job,) = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, *container["command"][1:]]
    for word in container["args"]:
        word = word.replace("$(JOB_COMPLETION_INDEX)", "0")
        word = "--master-addr=127.0.0.1" if word.startswith("--master-addr") else word
        command.append(f"--master-port={free_port()}" if word.startswith("--master-port") else word)
    path = f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"
    config.write_text(config.read_text().replace("steps = 50", "stepz = 50"))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 2 and "train.stepz" in done.stderr


@pytest.mark.long
def test_nan_gives_its_own_code(tmp_path: Path) -> None:
    assert ended(pod(write(tmp_path, rate="1e30"))) == 17


@pytest.mark.long
def test_the_node_of_the_cause_ends_first_and_with_its_code(tmp_path: Path) -> None:
    """Rank 1, alone on node 1, raises; rank 0 loses its peer,
    and its node waits to be ended by the scheduler.
    """
    port, config = free_port(), write(tmp_path, "raises")
    pods = [pod(config, nodes=2, node=node, port=port) for node in (0, 1)]
    try:
        assert ended(pods[1]) == 2
        ended_s = time.monotonic()
        assert ended(pods[0]) == 1
        assert time.monotonic() - ended_s > 3
    finally:
        for each in pods:
            each.terminate()


@pytest.mark.long
def test_a_node_that_waits_for_a_failed_one_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """Rank 1 fails before the rendezvous, at which rank 0 would wait for minutes."""
    process = pod(write(tmp_path), nodes=2, node=0, port=free_port())
    time.sleep(8)
    process.terminate()
    begin_s = time.monotonic()
    assert ended(process) not in (0, 2, 17) and time.monotonic() - begin_s < 40


@pytest.mark.long
def test_a_killed_rank_is_no_permanent_failure(tmp_path: Path) -> None:
    assert ended(pod(write(tmp_path, "killed"))) == 1


@pytest.mark.long
def test_a_signal_reaches_the_ranks_which_save(tmp_path: Path) -> None:
    process = pod(write(tmp_path), "--train.steps=100000", "--checkpoint.every=2")
    while not any(tmp_path.glob("pod/checkpoints/step-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.terminate()
    assert ended(process) == 85


def record(rank: int, at_s: float, exit_code: int, lost_peer: bool = False) -> FailureRecord:
    return FailureRecord(rank, at_s, "", "", exit_code, lost_peer)


def test_the_earliest_record_that_is_no_echo_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    for each in (record(0, 1.0, 1, lost_peer=True), record(1, 3.0, 85), record(2, 2.0, 17)):
        leave_record(each)
    assert [failure.exit_code for failure in read_failures(tmp_path)] == [17, 85, 1]
    monkeypatch.setenv("RANK", "2")
    leave_exit_code(1)  # the first record of a rank counts
    monkeypatch.setenv("RANK", "3")
    leave_exit_code(0)
    assert [failure.rank for failure in read_failures(tmp_path)] == [2, 1, 0]
    leave_exit_code(2)
    assert read_failures(tmp_path)[-2].exit_code == 2


def test_codes_that_recur_are_never_restarted_here_either() -> None:
    assert RECURRING_EXIT_CODES == (2, 17) and not {*RECURRING_EXIT_CODES} & {*TRANSIENT_EXIT_CODES}


@pytest.mark.parametrize(
    "kind", [torch.distributed.DistStoreError, torch.distributed.DistNetworkError]
)
def test_a_store_that_is_gone_with_another_node_is_an_echo(kind: type[RuntimeError]) -> None:
    assert (
        describe(kind("Broken pipe"), 0).lost_peer
        and not describe(RuntimeError("a bug"), 0).lost_peer
    )
