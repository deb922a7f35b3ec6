"""Processes that mpirun, mpiexec and their kin have started: one rank each, or one message;
never n times all ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.errors import MeshError
from meshwright_launch.environment import Launcher, launch_environment, rank_variables, read_place
from tests.launch.test_environment import SRUN
from tests.support.errors import has_code

ROOT = Path(__file__).parents[2]

OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "916717569",
    "PMIX_RANK": "1",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "PMI_FD": "8",
}
CRAY = {
    "PALS_RANKID": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
}
MVAPICH = {
    f"MV2_COMM_WORLD_{name}": value for name, value in zip(("RANK", "SIZE"), "12", strict=True)
} | {
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "1",
}
JSRUN = {
    f"JSM_NAMESPACE_{name}": value for name, value in zip(("RANK", "SIZE"), "12", strict=True)
} | {
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
KINDS = {
    "ompi": OMPI,
    "hydra": HYDRA,
    "cray": CRAY,
    "mvapich": MVAPICH,
    "flux": FLUX,
    "jsrun": JSRUN,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_of_an_mpi_launcher_is_one_rank(kind: str) -> None:
    env = KINDS[kind]
    assert launch_environment(env) is Launcher.MPI
    variables = rank_variables(Launcher.MPI, env)
    assert read_place(variables)[:3] == (1, 2, 1)
    assert variables["MASTER_ADDR"] == "127.0.0.1" and variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert 1024 < int(variables["MASTER_PORT"]) < 32768
    theirs = env | {"MASTER_ADDR": "h7", "MASTER_PORT": "1234"}
    kept = rank_variables(Launcher.MPI, theirs)
    assert (kept["MASTER_ADDR"], kept["MASTER_PORT"]) == (
        "h7",
        "1234",
    ) and "GLOO_SOCKET_IFNAME" not in kept


def test_jobs_of_one_host_meet_at_ports_of_their_own() -> None:
    ports = {
        rank_variables(Launcher.MPI, OMPI | {"PMIX_NAMESPACE": str(job)})["MASTER_PORT"]
        for job in range(50)
    }
    assert len(ports) >= 49


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (
            OMPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
            Launcher.NONE,
        ),
        (HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0"}, Launcher.NONE),
        # torchrun in each process of mpirun
        (OMPI | {"RANK": "1", "WORLD_SIZE": "2"}, Launcher.TORCHRUN),
        # srun --mpi=pmi2
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "3"}, Launcher.SLURM),
        # srun --mpi=pmix
        (SRUN | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.4711.0"}, Launcher.SLURM),
        (SRUN | OMPI, Launcher.MPI),  # mpirun in a job of Slurm: srun has started its daemons only
        ({"FLUX_JOB_SIZE": "4"}, Launcher.NONE),  # the shell of `flux alloc`
        ({"PMI_SIZE": "4"}, Launcher.NONE),
    ],
)
def test_what_else_may_stand_in_the_environment(env: dict[str, str], launcher: Launcher) -> None:
    assert launch_environment(env) is launcher


@pytest.mark.parametrize(
    "without", ["OMPI_COMM_WORLD_LOCAL_SIZE", "several hosts", "OMPI_COMM_WORLD_LOCAL_RANK"]
)
def test_what_is_not_known_is_refused_with_the_launchers_name(without: str) -> None:
    env = {name: value for name, value in OMPI.items() if name != without}
    if without == "several hosts":
        env |= {"OMPI_COMM_WORLD_SIZE": "4"}
    assert launch_environment(env) is Launcher.MPI
    with pytest.raises(
        MeshError, match=r"mpirun \(OMPI_COMM_WORLD_SIZE", check=has_code(*CODES)
    ) as caught:
        rank_variables(Launcher.MPI, env)
    assert "MASTER_ADDR" in str(caught.value) or "LOCAL_RANK" in str(caught.value)


CODES = ("MW-LAUNCH-101", "MW-LAUNCH-102")


@pytest.mark.parametrize("text", ["x", "-1", "9" * 5000, "²", "1.0"])
def test_a_size_that_is_no_number_is_one_message(text: str) -> None:
    with pytest.raises(
        MeshError, match="OMPI_COMM_WORLD_SIZE = ", check=has_code("MW-SYSTEM-008")
    ) as caught:
        launch_environment(OMPI | {"OMPI_COMM_WORLD_SIZE": text})
    assert len(str(caught.value)) < 300


def test_a_rank_of_unknown_size_is_refused() -> None:
    with pytest.raises(MeshError, match="PMIX_RANK = 3", check=has_code("MW-LAUNCH-100")):
        launch_environment({"PMIX_NAMESPACE": "prterun-h-1@1", "PMIX_RANK": "3"})


def samples(split: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return samples of eight tokens, as ``data.builder``."""
    rows = torch.arange(16 * 9).reshape(16, 9) % 32
    return [(row[:-1], row[1:]) for row in rows]


CONFIG = """
[run]
name = "mpi"
[model]
builder = "meshwright_models.gpt2:build"
options = { vocab_size = 32, hidden_size = 16, num_layers = 2, num_heads = 2, max_sequence_length = 8, dropout = 0.0 }
[data]
builder = "tests.launch.test_mpi:samples"
[batch]
micro_batch_size = 1
global_batch = 4
[train]
steps = 2
device = "cpu"
[parallel]
dp = 2
"""


def started(place: Path, variables: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    """Start one `meshwright train` with each of these environments, as mpirun does."""
    (place / "a.toml").write_text(CONFIG)
    words = [sys.executable, "-m", "meshwright_launch", "train", "a.toml"]
    plain = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(words, cwd=place, env=plain | each, **pipes) for each in variables]  # type: ignore[call-overload]


def of_rank(rank: int, *left_out: str) -> dict[str, str]:
    """Return Open MPI's variables of a rank of two on one host."""
    own = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PMIX_RANK": str(rank),
    }
    return {name: value for name, value in (OMPI | own).items() if name not in left_out}


@pytest.mark.slow
def test_two_processes_of_mpirun_train_one_run(tmp_path: Path) -> None:
    ranks = started(tmp_path, [of_rank(0), of_rank(1)])
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "mpirun (OMPI_COMM_WORLD_SIZE = 2)" in said[0][1] and said[1] == ("", "")
    records = [
        json.loads(line) for line in (tmp_path / "runs/mpi/metrics.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in records] == [1, 2]
    assert "= 2 ranks on 1 node of 2" in said[0][0] and "starting" not in said[0][0]


def test_processes_that_cannot_meet_start_nothing(tmp_path: Path) -> None:
    rank = started(tmp_path, [of_rank(1, "OMPI_COMM_WORLD_LOCAL_SIZE")])[0]
    _, said = rank.communicate(timeout=60)
    assert rank.returncode == 2 and "MW-LAUNCH-101" in said and "Traceback" not in said
    assert not (tmp_path / "runs").exists()
